"""How often a drafter's choices hold, by how sure it is of them. Pure."""

from __future__ import annotations

import math

from vllm_specrollout.types import TENTHS

_PRIOR = 4.0
"""Observations that the drafter's own probability counts for."""


class Survival:
    """Learned by rank (the first choice, any other) and by the tenth of the drafter's probability."""

    def __init__(self) -> None:
        # [2][TENTHS] how often such choices were looked at, and held
        self._looked = [[0.0] * TENTHS, [0.0] * TENTHS]
        self._held = [[0.0] * TENTHS, [0.0] * TENTHS]

    def observe(self, rank: int, log_q: float, holds: bool) -> None:
        kind, tenth = _cell(rank, log_q)
        self._looked[kind][tenth] += 1.0
        self._held[kind][tenth] += holds

    def log(self, rank: int, log_q: float) -> float:
        """Natural logarithm of the probability that the choice holds where its parent does."""
        kind, tenth = _cell(rank, log_q)
        own = math.exp(log_q)
        rate = (self._held[kind][tenth] + _PRIOR * own) / (self._looked[kind][tenth] + _PRIOR)
        return math.log(min(max(rate, 1e-9), 1.0))


def _cell(rank: int, log_q: float) -> tuple[int, int]:
    return min(rank, 1), min(int(math.exp(log_q) * TENTHS), TENTHS - 1)
