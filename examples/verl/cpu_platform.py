"""A platform without accelerators for verl, named by `VERL_USE_EXTERNAL_MODULES` and `VERL_PLATFORM`.

As much of it as the vLLM server and the transfer of weights ask for; verl's own training asks for more.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class PlatformCPU(PlatformBase):
    """One device, which is the host."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        manual_seed=torch.manual_seed,
    )
    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = _nothing
    cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


PlatformRegistry.register(platform="cpu")(PlatformCPU)
