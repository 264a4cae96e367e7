"""TLT's adaptive drafting: a bandit picks the depth and the size for the batch at hand, below a largest batch.

Source: TLT, section 5 (threshold, Algorithm 1), Table 4 (which sizes suit which batches) and section 6.3 (topK fixed).
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vllm_specrollout.budgets.papers.plans import PaperBudget, Strategy, everything_within, no_drafts, tree_limits
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.config.budgets import TltOptions
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, StepRecord, StepTiming, TreeBatch

Earned = TypeVar("Earned")

# Table 4: of 64 tokens to verify, all are best at batch 1, 48 at 2 and 4, 16 from 8 on
_THRESHOLDS = (1, 2, 8)
_SHARES = (1.0, 0.75, 0.25)
EPSILON = 0.1
"""Probability of trying any strategy, instead of the best one so far (Algorithm 1); the text gives no number."""
WINDOW = 16
"""Steps of each strategy that are remembered (Algorithm 1); the text gives no number."""


@dataclass(frozen=True, slots=True)
class Draw:
    """An arm that was drawn, and why."""

    bucket: int
    arm: int
    # untried, only, explore or exploit
    reason: str


class BucketedBandit(Generic[Earned]):
    """TLT's bucketed epsilon-greedy bandit (section 5.2, Algorithm 1): one for each range of batch sizes.

    Where the algorithm leaves a gap, this one closes it:

    - An arm that earned nothing yet is tried before any other, in order. It is known by its count: a reward of 0.0 is a
      reward, and a bad one.
    - What an arm earned stays with the bucket that it was drawn in, however many requests the step turned out to have.
    - What it earned is valued when arms are compared, all by the same measure, which may have been learned meanwhile.

    Args:
        thresholds: smallest batch of each bucket, ascending from 1; the last bucket has no end.
        num_arms: arms of each bucket, at least one, in the order of the thresholds.
        reward: of what an arm earned; more is better.
        epsilon: probability of exploring.
        window: steps remembered per arm; the median of an even number of them is the mean of the middle two.
        rng: the only source of chance.
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


@dataclass(frozen=True, slots=True)
class _DrawnPlan(StepPlan):
    """A plan that knows which arm it came from, so that what comes of it reaches that arm."""

    draw: Draw | None = None


def strategies_for(max_nodes: int, max_depth: int, options: TltOptions) -> list[list[Strategy]]:
    """Arms of each bucket: one size per bucket, in full, half and quarter depth, all with the same topK."""
    groups = []
    for share in _SHARES:
        nodes = max(1, round(share * max_nodes))
        deepest = min(nodes, max_depth, options.depth)
        arms = [Strategy(nodes, max(1, deepest // part), options.top_k) for part in (1, 2, 4)]
        # small limits make some of them the same: an arm counts once
        groups.append(list(dict.fromkeys(arms)))
    return groups


class TltBudget(PaperBudget):
    """Drafts below a threshold of running requests, by the strategy that was most worth it lately.

    Args:
        max_nodes, max_depth: the engine's limits; strategies are shares of them.
        rng: the bandit's source of chance.
        cost: what plain steps cost, for the rewards.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        options: TltOptions | None = None,
        *,
        rng: np.random.Generator,
        cost: StepCost | None = None,
    ) -> None:
        super().__init__(max_nodes, max_depth, cost)
        self.options = options or TltOptions()
        self.strategies = strategies_for(max_nodes, max_depth, self.options)
        self.bandit: BucketedBandit[StepTiming] = BucketedBandit(
            _THRESHOLDS,
            [len(group) for group in self.strategies],
            self.reward,
            epsilon=EPSILON,
            window=WINDOW,
            rng=rng,
        )
        self._draw: Draw | None = None  # of the limits given last

    def reward(self, step: StepTiming) -> float:
        """How many times as fast as plain decoding a step was.

        Algorithm 1 has (accepted / batch + 1) * batch / elapsed, tokens per millisecond. That grows with the batch, so
        an arm seen at the larger batches of a bucket would look better; and divided by the batch, worse. So it is
        divided by what plain decoding yields at that very batch: tokens * plain_ms(batch) / (batch * step_ms).
        """
        return step.tokens * self.cost.plain_ms(step.batch) / (max(step.batch, 1) * step.step_ms)

    def steps_off(self, num_requests: int) -> int:
        return int(num_requests >= self.options.threshold)

    def limits(self, batch: RequestBatch) -> DraftLimits:
        self._draw = None
        if self.steps_off(batch.size):
            return no_drafts(batch, "large batch")
        draw = self._draw = self.bandit.draw(batch.size)
        return tree_limits(batch, self.strategies[draw.bucket][draw.arm], draw.reason)

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        plan = everything_within(proposals, limits, batch, width=self.options.top_k)
        return _DrawnPlan(plan.trees, plan.reason, plan.is_on, draw=self._draw)

    def observe(self, record: StepRecord) -> None:
        """Reward the arm that the step's plan came from; steps with prompts, or without drafts, reward nobody."""
        step = record.timing
        if step is None:
            return
        self.cost.observe(step)
        draw = record.plan.draw if isinstance(record.plan, _DrawnPlan) else None
        if draw is not None and record.trees.num_nodes and step.is_decode_only and 0.0 < step.step_ms < math.inf:
            self.bandit.record(draw, step)
