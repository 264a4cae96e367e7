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
        self.model_runner.get_model().model.norm.weight.copy_(self._norm(seed))
        return self.loaded

    def load_norm(self, seed: int) -> None:
        """The same, by the model's own way."""
        self.model_runner.get_model().load_weights([("model.norm.weight", self._norm(seed))])

    def _norm(self, seed: int) -> torch.Tensor:
        first = self.__dict__.setdefault("_first", self.model_runner.get_model().model.norm.weight.clone())
        chance = torch.Generator().manual_seed(seed)
        return first * (0.6 + 0.8 * torch.rand(first.shape, generator=chance)) if seed else first

    def refit_later(self) -> None:
        """By its name it may bring weights, and it does not."""


class MakesItsRunner(CPUWorker):
    """What spec rollout cannot be mixed into."""

    def _make_model_runner(self) -> Any:
        raise NotImplementedError


class NoWorker:
    """No worker at all."""
