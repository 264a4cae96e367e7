"""What part of the steps that drafts were expected to save has come true. Pure.

What belongs here: comparing what was promised to the makespan with what became of it. Not what a token is worth.

A draft brings its tokens to one request; the makespan is shorter only if that one, or all that run beside it, would
have ended last. Weights (policies/makespan.py) say so for one more token of each. Several tokens at once are worth less
than their sum, since a request that is ahead no longer ends last, and those that run ahead are those whose drafts are
accepted. So every few steps, over which n steps were taken and request i gained t_i tokens, compare

    promised = sum_i weight_i * (t_i - n)
    realised = max_i L_i - max_i (L_i - t_i) - n            steps, L_i being the tokens it still needed before

and believe later promises as far as earlier ones came true, per size of the batch. The sum of `realised` over a rollout
is the number of steps that it was in fact shorter than plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_PRIOR = 2.0  # steps promised, and kept, before any are seen
_MEMORY = 0.95  # weight left to what is known after each further comparison: a promise broken once may be kept later


class Truth:
    """Compares promises; one is open at a time."""

    def __init__(self) -> None:
        # binary digits of the batch -> steps promised, steps realised
        self._sums: dict[int, list[float]] = {}
        # of the open promise: request -> its length then; [R, K] tokens it may still need; [R] weights
        self._lengths: dict[str, int] = {}
        self._needs: Array = np.zeros((0, 1))
        self._weights: Array = np.zeros(0)

    def share(self, batch: int) -> float:
        """From 0 to 1: what part of a promise to so many requests is to be believed."""
        promised, realised = self._sums.get(batch.bit_length(), (0.0, 0.0))
        return min(max((_PRIOR + realised) / (_PRIOR + promised), 0.0), 1.0)

    def promise(self, lengths: Mapping[str, int], needs: Array, weights: Array) -> None:
        """Open a promise.

        Args:
            lengths: request -> tokens it has, prompt included; in the order of the rows.
            needs: [R, K] equally likely values of how many tokens it still needs.
            weights: [R] steps that one more token of each saves.
        """
        self._lengths = dict(lengths)
        # one row's cases say nothing of another's: what is the k-th of one meets different ones of the others
        self._needs = np.stack([np.roll(row, 3 * i) for i, row in enumerate(needs)])
        self._weights = weights

    def close(self, lengths: Mapping[str, int], steps: int) -> None:
        """The open promise, if any, after so many steps; a request that `lengths` misses has got all it needed."""
        for sums in self._sums.values():
            sums[0] *= _MEMORY
            sums[1] *= _MEMORY
        if not self._lengths or not steps:
            return
        means = self._needs.mean(axis=1)
        gained = np.asarray(
            [
                lengths[name] - before if name in lengths else mean
                for (name, before), mean in zip(self._lengths.items(), means.tolist(), strict=True)
            ]
        )
        promised = float(self._weights @ np.maximum(gained - steps, 0.0))
        if promised > 0.0:
            left = np.maximum(self._needs - gained[:, None], 0.0)
            realised = float((self._needs.max(axis=0) - left.max(axis=0)).mean()) - steps
            sums = self._sums.setdefault(len(self._lengths).bit_length(), [0.0, 0.0])
            sums[0] += promised
            sums[1] += realised
        self._lengths = {}
