"""OpenRLHF's worker extension where there is no CUDA: weights come from a file, and all else is OpenRLHF's own code."""

from __future__ import annotations

from typing import Any
from unittest import mock

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap


class _FromFile:
    """Stands in for the process group: what is broadcast is read."""

    def __init__(self, path: str) -> None:
        from safetensors.torch import load_file

        self._weights = load_file(path)
        self.name = ""

    def broadcast(self, weight: Any, src: int, stream: Any) -> None:
        weight.copy_(self._weights[self.name])


class CpuWorkerWrap(WorkerWrap):
    """`worker_extension_cls` of RolloutRayActor on CPU."""

    def init_process_group(self, master_address: str, *args: Any) -> None:
        """`master_address` is the path of a safetensors file."""
        self._model_update_with_ray, self._model_update_group = False, _FromFile(master_address)

    def update_weight(self, name: str, *args: Any, **kwargs: Any) -> None:
        import torch

        empty = torch.empty
        self._model_update_group.name = name
        # its device is written down there as "cuda"
        with (
            mock.patch.object(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype)),
            mock.patch.object(torch.cuda, "current_stream", lambda: None),
        ):
            super().update_weight(name, *args, **kwargs)
