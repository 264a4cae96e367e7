"""TLT's bucketed epsilon-greedy bandit. What belongs here: arms, rewards and the choice between them; no trees.

Source: TLT, section 5.2, Algorithm 1 (BEG-MAB). Where the algorithm leaves a gap or would go wrong, this one differs:

- An arm that was never rewarded is tried before any other, in order. It is known by its count: a reward of 0.0 is a
  reward, and a bad one.
- Rewards are kept per bucket and arm. One earned in another bucket than the arm was drawn in is dropped, and arms are
  compared by reward per running request, so that an arm last tried at a larger batch does not look better for it.
- Exploration fades with the number of draws n in the bucket, as epsilon * (n0 / n)^(1/3). With a constant epsilon the
  regret grows in proportion to time for ever. `restart` brings it back, for when the arms are known to have changed.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.errors import ConfigError

_FULL_EXPLORATION = 100
"""n0: draws of a bucket for which epsilon stays what it was set to."""


@dataclass(frozen=True, slots=True)
class Draw:
    """An arm that was drawn, and why."""

    bucket: int
    arm: int
    # untried, only, explore or exploit
    reason: str


class BucketedBandit:
    """One bandit for each range of batch sizes.

    Args:
        thresholds: smallest batch of each bucket, ascending from 1; the last bucket has no end.
        num_arms: arms of each bucket, in the order of the thresholds.
        epsilon: probability of exploring at first.
        window: rewards remembered per arm; the median of an even number of them is the mean of the middle two.
        rng: the only source of chance.

    Raises:
        ConfigError: thresholds that do not start at 1 or do not ascend, a bucket without arms, or as many buckets as
            there are not: a table with a hole has no answer for some batch.
    """

    def __init__(
        self,
        thresholds: Sequence[int],
        num_arms: Sequence[int],
        *,
        epsilon: float = 0.1,
        window: int = 16,
        rng: np.random.Generator,
    ) -> None:
        _check(thresholds, num_arms, epsilon, window)
        self._thresholds = list(thresholds)
        self._epsilon = epsilon
        self._rng = rng
        # [bucket][arm] rewards per running request, newest last
        self._rewards: list[list[deque[float]]] = [[deque(maxlen=window) for _ in range(n)] for n in num_arms]
        self._draws = [0] * len(num_arms)

    def bucket(self, batch: int) -> int:
        """The bucket of a batch size; batches below 1 share the first one's."""
        return max(bisect.bisect_right(self._thresholds, batch) - 1, 0)

    def draw(self, batch: int) -> Draw:
        """An arm for a step of `batch` requests."""
        bucket = self.bucket(batch)
        arms = self._rewards[bucket]
        for arm, rewards in enumerate(arms):
            if not rewards:
                return Draw(bucket, arm, "untried")
        if len(arms) == 1:
            return Draw(bucket, 0, "only")
        self._draws[bucket] += 1
        if self._rng.random() < self._exploration(bucket):
            return Draw(bucket, int(self._rng.integers(len(arms))), "explore")
        medians = [statistics.median(rewards) for rewards in arms]
        return Draw(bucket, medians.index(max(medians)), "exploit")

    def record(self, draw: Draw, batch: int, reward: float) -> None:
        """What a drawn arm earned, in a step of `batch` requests; the reward is the whole batch's."""
        if batch >= 1 and self.bucket(batch) == draw.bucket:
            self._rewards[draw.bucket][draw.arm].append(reward / batch)

    def restart(self) -> None:
        """Explore as at first; what is remembered stays until newer rewards push it out."""
        self._draws = [0] * len(self._draws)

    def _exploration(self, bucket: int) -> float:
        return self._epsilon * min(1.0, _FULL_EXPLORATION / self._draws[bucket]) ** (1.0 / 3.0)


def _check(thresholds: Sequence[int], num_arms: Sequence[int], epsilon: float, window: int) -> None:
    hint = "start at 1, ascend, and give each bucket at least one arm"
    if not thresholds or thresholds[0] != 1 or any(a >= b for a, b in zip(thresholds, thresholds[1:], strict=False)):
        raise ConfigError(f"batch thresholds are {list(thresholds)}, which leaves batches without a bucket", hint)
    if len(num_arms) != len(thresholds) or min(num_arms) < 1:
        raise ConfigError(f"{len(thresholds)} buckets have arms {list(num_arms)}", hint)
    if not 0.0 <= epsilon <= 1.0 or window < 1:
        raise ConfigError(
            f"epsilon is {epsilon:g} and the window {window}; limits are 0 to 1 and 1 or more", "use 0.1 and 16"
        )
