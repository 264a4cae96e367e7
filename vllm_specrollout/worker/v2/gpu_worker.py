"""The worker for CUDA devices; chosen by `worker_cls`."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_specrollout.worker.v2.worker import SpeculatingWorker


class SpecRolloutGPUWorker(SpeculatingWorker, Worker):
    runner_class = ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")
