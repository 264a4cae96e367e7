"""The scheduler: stock vLLM's, handed drafts with each step's output."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specrollout.worker.common import SpecRolloutOutput, config_of, with_speculation
from vllm_specrollout.worker.counts import PassesCounts
from vllm_specrollout.worker.endings import TellsEndings
from vllm_specrollout.worker.pressure import DraftsGiveWay
from vllm_specrollout.worker.queueing import OrdersQueue


class SpecRolloutScheduler(PassesCounts, TellsEndings, OrdersQueue, DraftsGiveWay, Scheduler):
    """Adds draft tokens to the requests they were made for, and admits long ones first; all else is stock.

    Stock code schedules whatever draft tokens a request carries, so it need not be told that drafts exist. It must not:
    with `num_spec_tokens` set it pads new requests with placeholder drafts, for the sake of GPU graphs.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.max_draft_tokens = config_of(vllm_config).max_draft_tokens
        # The grammar bitmasks need a row per draft token.
        self.structured_output_manager.vllm_config = with_speculation(vllm_config, self.max_draft_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, SpecRolloutOutput) and model_runner_output.drafts is not None:
            self.update_draft_token_ids(model_runner_output.drafts)
        return outputs

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        if spec_decoding_stats is None and self.log_stats and num_draft_tokens:
            spec_decoding_stats = SpecDecodingStats.new(self.max_draft_tokens)
        return super().make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, *args, **kwargs)
