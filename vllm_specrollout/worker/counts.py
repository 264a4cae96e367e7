"""How a worker's counts reach the frontend: on the statistics that the scheduler sends there with every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specrollout.observe.metrics import encode
from vllm_specrollout.worker.common import SpecRolloutOutput

_Base = Scheduler if TYPE_CHECKING else object


class PassesCounts(_Base):
    """Mixed into vLLM's schedulers.

    `num_kv_fetch_reqs_by_stage` is the one open table of numbers in `SchedulerStats` that vLLM reads by known names
    only. Ours lie there under names of our own, so nothing of the message between the processes has to change.
    """

    _counts: dict[str, int] | None = None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, SpecRolloutOutput):
            self._counts = model_runner_output.counts
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        counts, self._counts = self._counts, None
        if stats is not None and counts:
            stats.num_kv_fetch_reqs_by_stage.update(encode(counts))
        return stats
