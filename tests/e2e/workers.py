"""A trainer's own worker class."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class TrainersWorker(CPUWorker):
    """Writes weights in place, past everything that vLLM has for that."""

    loaded = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.loaded += 1

    @torch.no_grad()
    def write_in_place(self, seed: int) -> int:
        """Another last norm, 0 being the first one; returns how often this class has loaded a model."""
        norm = self.model_runner.get_model().model.norm.weight
        self.__dict__.setdefault("_first", norm.clone())
        factor = 0.6 + 0.8 * torch.rand(norm.shape, generator=torch.Generator().manual_seed(seed)) if seed else 1.0
        norm.copy_(self._first * factor)
        return self.loaded

    def refit_later(self) -> None:
        """By its name it may bring weights, and it does not."""


class MakesItsRunner(CPUWorker):
    """What spec rollout cannot be mixed into."""

    def _make_model_runner(self) -> Any:
        raise NotImplementedError


class NoWorker:
    """No worker at all."""
