"""Milliseconds of a forward pass, and the windows that the formulas of cluster/rates.py choose by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_specrollout.cluster.rates import Time
from vllm_specrollout.errors import ConfigError

MAX_WINDOW = 16
"""Longest window that a study plans."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Milliseconds of one forward pass over a batch.

        base + request * requests + row * rows + (steep - row) * max(rows - knee, 0)

    Rows are all tokens computed: one per request, and the drafts. Below the knee a device reads its weights for longer
    than it computes, so that rows are cheap; beyond it they are not.
    """

    base: float
    request: float = 0.0
    row: float = 0.0
    # per row beyond `knee`
    steep: float = 0.0
    knee: float = math.inf

    def __post_init__(self) -> None:
        # a comparison that nan fails too
        if not all(term >= 0.0 for term in astuple(self)):
            raise ConfigError(f"a term of {self} is below 0", "give terms of at least 0")

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Of so many requests with so many drafts each: what the formulas ask for."""
        return self.step_ms(batch, batch * drafts)

    def step_ms(self, requests: float, drafts: float = 0.0) -> float:
        """Of so many running requests with so many draft tokens between them."""
        rows = requests + drafts
        beyond = max(rows - self.knee, 0.0)
        return self.base + self.request * requests + self.row * (rows - beyond) + self.steep * beyond


def drain_ms(lengths: Ints, token_ms: Callable[[int], float]) -> float:
    """Milliseconds until the last of a batch's answers ends, all of which run from the start.

    Args:
        lengths: [N] tokens, int.
        token_ms: running requests -> milliseconds in which each of them gets one more token.
    """
    steps = np.diff(np.sort(lengths), prepend=0).tolist()
    return sum(count * token_ms(len(lengths) - ended) for ended, count in enumerate(steps) if count)


Rate = Callable[[Time, Time, int, int, float], float]
"""Drafter, verifier, batch, window, p -> tokens per millisecond of a request."""


def best_window(rate: Rate, p: float, batch: int, verifier: Time, drafter: Time) -> int:
    """The window with most tokens per ms, the shortest of several."""
    return max(range(1, MAX_WINDOW + 1), key=lambda window: rate(drafter, verifier, batch, window, p))
