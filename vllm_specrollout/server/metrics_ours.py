"""`vllm:spec_rollout_*` in vLLM's own /metrics: what `observe.metrics` counts, as prometheus knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specrollout.observe.metrics import METRICS, PREFIX, Metric, decode
from vllm_specrollout.server.metrics import LABELS


class Counts:
    """Our metrics of all engines that one stat logger stands for."""

    def __init__(self, logger: Any) -> None:
        """Args:
        logger: vLLM's stat logger, whose kinds of metrics (they differ under Ray) and label values are taken.
        """
        kinds = {"counter": logger._counter_cls, "gauge": logger._gauge_cls, "histogram": logger._histogram_cls}
        self._labels: Mapping[int, list[object]] = logger.per_engine_labelvalues
        self._known = {metric.name: (metric, _make(metric, kinds[metric.kind])) for metric in METRICS}
        for metric, made in self._known.values():
            if not metric.labels:
                for values in self._labels.values():
                    made.labels(*values)  # shown as 0 from the start

    def record(self, mixed: dict[str, int], engine: int) -> None:
        """Add what came with one step of an engine and take it out of the table; keys that are not ours stay."""
        for name, rest, count in decode(mixed):
            if name not in self._known:
                continue
            metric, made = self._known[name]
            if metric.kind == "histogram":
                child = made.labels(*self._labels[engine])
                for _ in range(count):
                    child.observe(int(rest[0]) / metric.scale)
                continue
            child = made.labels(*self._labels[engine], *rest)
            if metric.kind == "gauge":
                child.set(count)
            else:
                child.inc(count / metric.scale)


def _make(metric: Metric, cls: Any) -> Any:
    arguments: dict[str, Any] = {
        "name": PREFIX + metric.name,
        "documentation": metric.help,
        "labelnames": LABELS + list(metric.labels),
    }
    if metric.kind == "histogram":
        arguments["buckets"] = list(metric.buckets)
    if metric.kind == "gauge":
        arguments["multiprocess_mode"] = "mostrecent"
    return cls(**arguments)
