"""How often the tokens of chains are accepted. What belongs here: counts, and what is expected of a chain by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import IntArray

_MEMORY = 0.98
"""Weight left to a step's drafts after each further step with drafts: about the last fifty steps count."""
_SURE = 2.0
"""Standard errors that a rate must be off by: luck alone is so far below in one of 44 cases."""


@dataclass(slots=True)
class Rate:
    """So much per case, lately: accepted tokens per token that the target reached, or tokens per draft.

    All cases of a step fade together, so the order of requests within a step does not matter.
    """

    cases: float = 0.0
    total: float = 0.0

    def add(self, cases: int, total: int) -> None:
        """One more step; without any case nothing changes."""
        if cases:
            self.cases = _MEMORY * self.cases + cases
            self.total = _MEMORY * self.total + total

    @property
    def mean(self) -> float:
        """Per case; 0.0 before there was one."""
        return self.total / self.cases if self.cases else 0.0

    def is_surely_below(self, p: float) -> bool:
        """Whether this is below the probability `p` by more than luck with so few cases explains."""
        return p - self.mean > _SURE * math.sqrt(p * (1.0 - p) / self.cases) if self.cases else False


def tried_tokens(sizes: IntArray, num_accepted: IntArray) -> IntArray:
    """[R] tokens of each chain that the target reached: the accepted ones, and the first that was rejected."""
    return np.minimum(num_accepted + 1, sizes).astype(np.int32)


def tokens_per_step(p: float, size: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Tokens that a request gains from a step with a chain of `size` tokens, each accepted with p in its turn.

    The accepted ones and one of the target's own: the sum of p^i for i from 0 to `size`.
    """
    sizes = np.asarray(size, dtype=np.float64)
    return sizes + 1.0 if p >= 1.0 else (1.0 - p ** (sizes + 1.0)) / (1.0 - p)
