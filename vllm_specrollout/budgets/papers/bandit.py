"""TLT's bucketed epsilon-greedy bandit. What belongs here: arms, what they earned and the choice between them.

Source: TLT, section 5.2, Algorithm 1 (BEG-MAB). Where the algorithm leaves a gap, this one closes it:

- An arm that earned nothing yet is tried before any other, in order. It is known by its count: a reward of 0.0 is a
  reward, and a bad one.
- What an arm earned stays with the bucket that it was drawn in, however many requests the step turned out to have.
- What it earned is valued when arms are compared, all by the same measure, which may have been learned meanwhile.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vllm_specrollout.errors import ConfigError

Earned = TypeVar("Earned")


@dataclass(frozen=True, slots=True)
class Draw:
    """An arm that was drawn, and why."""

    bucket: int
    arm: int
    # untried, only, explore or exploit
    reason: str


class BucketedBandit(Generic[Earned]):
    """One bandit for each range of batch sizes.

    Args:
        thresholds: smallest batch of each bucket, ascending from 1; the last bucket has no end.
        num_arms: arms of each bucket, in the order of the thresholds.
        reward: of what an arm earned; more is better.
        epsilon: probability of exploring.
        window: steps remembered per arm; the median of an even number of them is the mean of the middle two.
        rng: the only source of chance.

    Raises:
        ConfigError: thresholds that do not start at 1 or do not ascend, or a bucket without arms: a table with a hole
            has no answer for some batch.
    """

    def __init__(
        self,
        thresholds: Sequence[int],
        num_arms: Sequence[int],
        reward: Callable[[Earned], float],
        *,
        epsilon: float,
        window: int,
        rng: np.random.Generator,
    ) -> None:
        _check(thresholds, num_arms)
        self._thresholds = list(thresholds)
        self._reward = reward
        self._epsilon = epsilon
        self._rng = rng
        # [bucket][arm] what the arm earned, newest last
        self._earned: list[list[deque[Earned]]] = [[deque(maxlen=window) for _ in range(n)] for n in num_arms]

    def bucket(self, batch: int) -> int:
        """The bucket of a batch size; batches below 1 share the first one's."""
        return max(bisect.bisect_right(self._thresholds, batch) - 1, 0)

    def draw(self, batch: int) -> Draw:
        """An arm for a step of `batch` requests."""
        bucket = self.bucket(batch)
        arms = self._earned[bucket]
        for arm, earned in enumerate(arms):
            if not earned:
                return Draw(bucket, arm, "untried")
        if len(arms) == 1:
            return Draw(bucket, 0, "only")
        if self._rng.random() < self._epsilon:
            return Draw(bucket, int(self._rng.integers(len(arms))), "explore")
        medians = [statistics.median(map(self._reward, earned)) for earned in arms]
        return Draw(bucket, medians.index(max(medians)), "exploit")

    def record(self, draw: Draw, earned: Earned) -> None:
        """What a drawn arm earned."""
        self._earned[draw.bucket][draw.arm].append(earned)


def _check(thresholds: Sequence[int], num_arms: Sequence[int]) -> None:
    hint = "start at 1, ascend, and give each bucket at least one arm"
    if not thresholds or thresholds[0] != 1 or any(a >= b for a, b in zip(thresholds, thresholds[1:], strict=False)):
        raise ConfigError(f"batch thresholds are {list(thresholds)}, which leaves batches without a bucket", hint)
    if len(num_arms) != len(thresholds) or min(num_arms) < 1:
        raise ConfigError(f"{len(thresholds)} buckets have arms {list(num_arms)}", hint)
