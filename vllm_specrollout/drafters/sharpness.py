"""How much a drafting model's opinion is sharpened before it meets the target's noise. Pure.

The draft token is argmax(s * log q + noise), with the very noise that the target's token is chosen with. s = 1 is plain
coupling; a large s is greedy drafting. Which s meets the target most often depends on how peaked both are, so it is
learned: now and then each of `CHOICES` says what it would have drafted, and the target says who was right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GREEDY = 1e4
"""An s that leaves the noise no say."""
CHOICES = (1.0, 2.0, 4.0, 8.0, GREEDY)
"""Candidates for s: plain coupling, doubled, and greedy drafting."""
FIRST = 2
"""Index of the one that is used before anything is known: hardly worse than greedy where that is best."""
MEMORY = 0.999
"""Weight left to an observation after each further one."""


class Sharpness:
    """Which of `CHOICES` meets the target most often."""

    def __init__(self) -> None:
        # [CHOICES] of the observed positions, how many each one met; ties go to FIRST
        self._hits = np.zeros(len(CHOICES))
        self._hits[FIRST] = 1e-6
        self.pinned: float | None = None
        """Used in the place of what was learned, by benchmarks."""

    @property
    def value(self) -> float:
        """The s to draft with."""
        if self.pinned is not None:
            return self.pinned
        return CHOICES[int(self._hits.argmax())]

    def observe(self, is_hit: npt.NDArray[np.bool_]) -> None:
        """What the candidates would have met.

        Args:
            is_hit: [positions, CHOICES].
        """
        self._hits *= MEMORY ** len(is_hit)
        self._hits += is_hit.sum(axis=0)
