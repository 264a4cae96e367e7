"""What only vLLM itself can say about this host; `specrollout doctor` asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The parts of vLLM that would serve here."""

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
    from vllm.triton_utils import HAS_TRITON

    forced = vllm.envs.VLLM_USE_V2_MODEL_RUNNER
    runner = "V2" if (HAS_TRITON if forced is None else forced) else "V1"
    attention = "chosen by vLLM per model"
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        attention = f"CPU_ATTN, {_get_attn_isa(torch.bfloat16, 32, 64)}"
    name = current_platform.device_name or "unknown"
    return HostFacts(name, current_platform.is_cpu(), current_platform.is_cuda(), runner, attention)
