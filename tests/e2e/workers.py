"""What a trainer adds to the worker."""

from __future__ import annotations

from typing import Any

import torch


class TrainersExtension:
    """Writes weights in place, past everything that vLLM has for that."""

    model_runner: Any

    @torch.no_grad()
    def write_in_place(self, seed: int) -> None:
        """Another last norm, 0 being the first one."""
        self.model_runner.get_model().model.norm.weight.copy_(self._norm(seed))

    def load_norm(self, seed: int) -> None:
        """The same, by the model's own way."""
        self.model_runner.get_model().load_weights([("model.norm.weight", self._norm(seed))])

    def _norm(self, seed: int) -> torch.Tensor:
        first = self.__dict__.setdefault("_first", self.model_runner.get_model().model.norm.weight.clone())
        chance = torch.Generator().manual_seed(seed)
        return first * (0.6 + 0.8 * torch.rand(first.shape, generator=chance)) if seed else first

    def refit_later(self) -> None:
        """By its name it may bring weights, and it does not."""
