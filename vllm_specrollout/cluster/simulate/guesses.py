"""Which draft tokens are right: drawn once per request, position and method, for all copies of a request alike.

Exact verification makes every copy of a request yield the same tokens, and a drafter that reads the same text drafts
the same. So what a draft is worth hangs on request, position and method, and not on who asks when: arms of a study that
differ in scheduling alone see the same guesses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_specrollout.cluster.simulate.workload import Ints, Workload

_LONGEST_RUN = 1000  # no window is longer; it keeps the table small


class Guesses:
    """All guesses of one rollout.

    Args:
        methods: how many of the workload's methods are used.
        rng: the source of chance; each method has a child of its own, so that one more method changes no other.
    """

    def __init__(self, work: Workload, methods: int, rng: np.random.Generator) -> None:
        # [N] where each request's positions begin in the tables
        self._begin: Ints = np.cumsum(work.length) - work.length
        # [M] tables [sum of lengths]: how many tokens from this one on are guessed right, up to the first miss
        self._runs: list[NDArray[np.int16]] = []
        for acceptance, child in zip(work.acceptance[:methods], rng.spawn(methods), strict=True):
            is_right = child.random(int(work.length.sum())) < np.repeat(acceptance, work.length)
            self._runs.append(_runs(is_right))

    def run(self, method: int, requests: Ints, position: Ints) -> Ints:
        """[R] how many drafts in a row are right from each position on. It may count beyond a request's end."""
        return self._runs[method][self._begin[requests] + position].astype(np.int64)

    def accepted(self, method: int, requests: Ints, position: Ints, window: Ints) -> Ints:
        """[R] how many of `window` drafts are right before the first miss."""
        return np.minimum(self.run(method, requests, position), window)


def _runs(is_right: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Distances to the next miss; beyond the last position there is one."""
    places = np.arange(len(is_right))
    misses = np.where(is_right, len(is_right), places)
    nearest = np.minimum.accumulate(misses[::-1])[::-1]
    return np.minimum(nearest - places, _LONGEST_RUN).astype(np.int16)
