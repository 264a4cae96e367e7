"""vLLM's own `vllm:spec_decode_*` counters, for an engine that has drafts but no `speculative_config`."""

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
        if config is not None and not self.spec_decoding_prom.spec_decoding_enabled:
            positions = SimpleNamespace(num_speculative_tokens=config.max_draft_tokens)
            self.spec_decoding_prom = self._spec_decoding_cls(positions, LABELS, self.per_engine_labelvalues)

    return __init__
