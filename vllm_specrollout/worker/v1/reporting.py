"""What a V1 worker tells of its runner, on CPU and on CUDA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm_specrollout.worker.stats import Stats

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from vllm_specrollout.worker.v1.runner import SpecRolloutV1
else:
    _Base = object


class StatsMixin(_Base):
    """Mixed into vLLM's workers."""

    model_runner: SpecRolloutV1

    def spec_rollout_stats(self, reset: bool = False) -> dict[str, Any]:
        """Totals of this worker since the last reset; see `Stats`."""
        runner = self.model_runner
        stats = dataclasses.asdict(runner.stats)
        stats["shape"], stats["shape_reason"] = runner.shape[0].value, runner.shape[1]
        rows = getattr(runner, "rows", None)
        stats["rows"] = None if rows is None else {**dataclasses.asdict(rows), "are_alike": rows.are_alike}
        stats["request_reasons"] = runner.book.desk.reasons()
        stats["failures"] = dict(runner.spec_rollout.guard.failures)
        if reset:
            runner.stats = Stats()
        return stats
