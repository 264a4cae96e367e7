"""The scheduler: stock vLLM's, told that drafts exist and handed them with each step's output."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specrollout.worker.common import SpecRolloutOutput, config_of, with_speculation


class SpecRolloutScheduler(Scheduler):
    """Adds draft tokens to the requests they were made for; all else is stock."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        aware = with_speculation(vllm_config, config_of(vllm_config).max_draft_tokens)
        super().__init__(aware, *args, **kwargs)
        # The manager was made with the plain configuration; its bitmasks need a row per draft token.
        self.structured_output_manager.vllm_config = aware

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, SpecRolloutOutput) and model_runner_output.drafts is not None:
            self.update_draft_token_ids(model_runner_output.drafts)
        return outputs
