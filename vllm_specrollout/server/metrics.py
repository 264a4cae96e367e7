"""vLLM's stat logger of an engine with drafts: its own `vllm:spec_decode_*` counters, and ours beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_specrollout.server import settings

LABELS = ["model_name", "engine"]


def count_drafts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PrometheusStatLogger.__init__`. The stock counters only ask how many draft positions there are."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        config = settings.config_of(vllm_config)
        if config is None:
            return
        from vllm_specrollout.server.metrics_ours import Counts  # numpy: not when the plugin is registered

        self.record = _recording(self.record, Counts(self))
        if not self.spec_decoding_prom.spec_decoding_enabled:
            positions = SimpleNamespace(num_speculative_tokens=config.max_draft_tokens)
            self.spec_decoding_prom = self._spec_decoding_cls(positions, LABELS, self.per_engine_labelvalues)

    return __init__


def _recording(record: Callable[..., None], counts: Any) -> Callable[..., None]:
    """The logger's `record`, which also takes out what our workers sent along."""

    @functools.wraps(record)
    def wrapper(scheduler_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any) -> None:
        record(scheduler_stats, *args, engine_idx=engine_idx, **kwargs)
        if scheduler_stats is not None:
            counts.record(scheduler_stats.num_kv_fetch_reqs_by_stage, engine_idx)

    return wrapper
