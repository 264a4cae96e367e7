"""What became of one request's drafts, in its answer (`--per-request-spec-decode-metrics`).

vLLM's scheduler counts it, from the numbers that ours hands it. But vLLM has it only with a `speculative_config`, which
our engine does not have, so the option reaches the scheduler by a way of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request

from vllm_specrollout.worker.common import REQUEST_METRICS_KEY, config_of

_Base = Scheduler if TYPE_CHECKING else object


class DraftedMetrics(RequestSpecDecodeMetrics):
    """vLLM's, of steps with drafts alone: on the V2 runner there may be room that stays empty."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


class RequestMetricsMixin(_Base):
    """Mixed into vLLM's schedulers."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.max_draft_tokens = config_of(vllm_config).max_draft_tokens
        self.spec_decode_metrics_level = vllm_config.additional_config.get(REQUEST_METRICS_KEY, "none")

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            # vLLM's own has a place for as many accepted tokens as its `speculative_config` says: none
            request.spec_decode_metrics = DraftedMetrics.new(self.max_draft_tokens)
