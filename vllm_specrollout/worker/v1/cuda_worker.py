"""The CUDA worker for vLLM's V1 model runner: stock vLLM's, with our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.worker.calls import DrafterMixin, ExplainsMixin, StatsMixin, TrainerMixin
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.v1.collecting import runner_for
from vllm_specrollout.worker.v1.cuda_runner import SpecRolloutCUDARunner


class SpecRolloutCUDAWorker(StatsMixin, DrafterMixin, ExplainsMixin, TrainerMixin, Worker):
    """Chosen by `worker_cls`."""

    model_runner: SpecRolloutCUDARunner

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            raise UnsupportedError(
                "this worker is for vLLM's V1 model runner, and the configuration asks for V2",
                "set `VLLM_USE_V2_MODEL_RUNNER=0`",
            )
        runner = runner_for(config_of(self.vllm_config).collect, SpecRolloutCUDARunner)
        return runner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        # vLLM profiled the sampler with one row per request
        return super().determine_available_memory() - self.model_runner.sampling_bytes
