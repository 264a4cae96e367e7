"""What can be set for a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_specrollout.config.checks import check_choice, check_range, check_real
from vllm_specrollout.errors import ConfigError

METHODS = ("eagle3", "eagle")
LOSSES = ("kl_div", "ce", "tv", "lk_hybrid")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All that a run depends on, beside what the buffer holds."""

    method: str = "eagle3"
    """`eagle3` (a head over several layers' hidden states, with an output head of its own) or `eagle` (over the last
    one's, with the target's output head)."""
    epochs: int = 1
    """Passes over the buffer."""
    batch_tokens: int = 2048
    """Tokens per optimiser step."""
    learning_rate: float = 1e-3
    """The highest one; it rises over the first steps and falls to a tenth along a cosine."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    num_levels: int = 4
    """Tokens ahead that the head is trained for, on its own drafts' hidden states (training-time test)."""
    level_decay: float = 0.9
    """Weight of a level's loss relative to the one before it."""
    loss: str = "kl_div"
    """`kl_div` (cross-entropy with the target's probabilities), `ce` (with its likeliest token), `tv` (what rejection
    sampling would refuse), `lk_hybrid` (between the first and the third)."""
    feature_weight: float = 0.1
    """`eagle` only: weight of the distance to the target's hidden states."""
    draft_vocab: int = 0
    """`eagle3` only: tokens that the head may draft, the most frequent ones; 0: all."""
    dtype: str = "auto"
    """Of the products: `bfloat16`, `float32`, or `auto`: bfloat16 where the hardware has units for it."""
    save_every: int = 200
    """Steps between two saved states."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_real("feature_weight", self.feature_weight, 0.0, 1000.0)
        if self.method != "eagle3" and self.draft_vocab:
            raise ConfigError(
                f"`draft_vocab` is {self.draft_vocab}, and an `{self.method}` head has its target's output head",
                "leave `draft_vocab` out, or train an `eagle3` head",
            )
        check_range("epochs", self.epochs, 1, 1000)
        check_range("batch_tokens", self.batch_tokens, 16, 1 << 20)
        check_real("learning_rate", self.learning_rate, 1e-9, 1.0)
        check_real("weight_decay", self.weight_decay, 0.0, 10.0)
        check_real("clip", self.clip, 1e-6, 1e6)
        check_range("num_levels", self.num_levels, 1, 16)
        check_real("level_decay", self.level_decay, 0.0, 1.0)
        check_choice("loss", self.loss, LOSSES)
        check_range("draft_vocab", self.draft_vocab, 0, 1 << 24)
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_range("save_every", self.save_every, 1, 1 << 30)

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step`, from 0."""
        warm = max(1, min(100, num_steps // 10))
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, num_steps - warm)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
