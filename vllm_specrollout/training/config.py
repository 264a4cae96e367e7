"""What can be set for a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from vllm_specrollout.config.checks import Choice, Range, check_fields
from vllm_specrollout.errors import ConfigError

METHODS = ("eagle3", "eagle")
LOSSES = ("kl_div", "ce", "tv", "lk_hybrid")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All that a run depends on, beside what the buffer holds."""

    method: Annotated[str, Choice(METHODS)] = "eagle3"
    """`eagle3` (a head over several layers' hidden states, with an output head of its own) or `eagle` (over the last
    one's, with the target's output head)."""
    epochs: Annotated[int, Range(1, 1000)] = 1
    """Passes over the buffer."""
    batch_tokens: Annotated[int, Range(16, 1 << 20)] = 2048
    """Tokens per optimiser step."""
    learning_rate: Annotated[float, Range(1e-9, 1.0)] = 1e-3
    """The highest one; it rises over the first steps and falls to a tenth along a cosine."""
    weight_decay: Annotated[float, Range(0.0, 10.0)] = 0.01
    clip: Annotated[float, Range(1e-6, 1e6)] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    num_levels: Annotated[int, Range(1, 16)] = 4
    """Tokens ahead that the head is trained for, on its own drafts' hidden states (training-time test)."""
    level_decay: Annotated[float, Range(0.0, 1.0)] = 0.9
    """Weight of a level's loss relative to the one before it."""
    loss: Annotated[str, Choice(LOSSES)] = "kl_div"
    """`kl_div` (cross-entropy with the target's probabilities), `ce` (with its likeliest token), `tv` (what rejection
    sampling would refuse), `lk_hybrid` (between the first and the third)."""
    feature_weight: Annotated[float, Range(0.0, 1000.0)] = 0.1
    """`eagle` only: weight of the distance to the target's hidden states."""
    draft_vocab: Annotated[int, Range(0, 1 << 24)] = 0
    """`eagle3` only: tokens that the head may draft, the most frequent ones; 0: all."""
    dtype: Annotated[str, Choice(("auto", *DTYPES))] = "auto"
    """Of the products: `bfloat16`, `float32`, or `auto`: bfloat16 where the hardware has units for it."""
    save_every: Annotated[int, Range(1, 1 << 30)] = 200
    """Steps between two saved states."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method != "eagle3" and self.draft_vocab:
            raise ConfigError(
                f"`draft_vocab` is {self.draft_vocab}, and an `{self.method}` head has its target's output head",
                "leave `draft_vocab` out, or train an `eagle3` head",
            )

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step`, from 0."""
        warm = max(1, min(100, num_steps // 10))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, num_steps - warm)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
