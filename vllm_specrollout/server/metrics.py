"""vLLM's stat logger of an engine with drafts: its own `vllm:spec_decode_*` counters, and ours beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.patches import features
from vllm_specrollout.server import settings

if TYPE_CHECKING:
    from vllm_specrollout.observe.metrics import Metric

LABELS = ["model_name", "engine"]


def count_drafts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PrometheusStatLogger.__init__`. The stock counters only ask how many draft positions there are."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        config = settings.config_of(vllm_config)
        if config is None:
            return
        self.record = _recording(self.record, Counts(self))
        if not self.spec_decoding_prom.spec_decoding_enabled:
            # who reads them by position expects as many as `--speculative-config` asked for
            asked = (config.speculative_config or {}).get("num_speculative_tokens")
            # and no draft is deeper than this
            most = min(asked or MAX_NODES, config.max_draft_tokens, config.max_depth)
            positions = SimpleNamespace(num_speculative_tokens=most)
            self.spec_decoding_prom = self._spec_decoding_cls(positions, LABELS, self.per_engine_labelvalues)

    return __init__


def _recording(record: Callable[..., None], counts: Counts) -> Callable[..., None]:
    """The logger's `record`, which also takes out what our workers sent along."""

    @functools.wraps(record)
    def wrapper(scheduler_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any) -> None:
        if scheduler_stats is not None:
            # before vLLM's own, which may show the whole table
            counts.record(getattr(scheduler_stats, features.installed().counts_field), engine_idx)
        record(scheduler_stats, *args, engine_idx=engine_idx, **kwargs)

    return wrapper


class Counts:
    """Our metrics of all engines that one stat logger stands for."""

    def __init__(self, logger: Any) -> None:
        """Args:
        logger: vLLM's stat logger, whose kinds of metrics (they differ under Ray) and label values are taken.
        """
        from vllm_specrollout.observe import metrics  # numpy: not when the plugin is registered

        self._decode = metrics.decode
        kinds = {"counter": logger._counter_cls, "gauge": logger._gauge_cls, "histogram": logger._histogram_cls}
        self._labels: Mapping[int, list[object]] = logger.per_engine_labelvalues
        self._known = {
            metric.name: (metric, _make(metrics.PREFIX + metric.name, metric, kinds[metric.kind]))
            for metric in metrics.METRICS
        }
        for metric, made in self._known.values():
            if not metric.labels:
                for values in self._labels.values():
                    made.labels(*values)  # shown as 0 from the start

    def record(self, mixed: dict[str, int], engine: int) -> None:
        """Add what came with one step of an engine and take it out of the table; keys that are not ours stay."""
        for name, rest, count in self._decode(mixed):
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
                child.set(count / metric.scale)
            else:
                child.inc(count / metric.scale)


def _make(name: str, metric: Metric, cls: Any) -> Any:
    arguments: dict[str, Any] = {
        "name": name,
        "documentation": metric.help,
        "labelnames": LABELS + list(metric.labels),
    }
    if metric.kind == "histogram":
        arguments["buckets"] = list(metric.buckets)
    if metric.kind == "gauge":
        arguments["multiprocess_mode"] = "mostrecent"
    return cls(**arguments)
