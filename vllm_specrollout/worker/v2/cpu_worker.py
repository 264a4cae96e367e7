"""The V2 runner on CPU, under Triton's interpreter: to test the GPU's path without a GPU, never to be fast."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specrollout.worker.v2.worker import SpeculatingWorker


class SpecRolloutCPUWorkerV2(SpeculatingWorker, CPUWorker):
    runner_class = ("vllm.v1.worker.cpu.model_runner", "CPUModelRunner")
