"""TLT's adaptive drafting: a bandit picks the depth and the size for the batch at hand, below a largest batch.

Source: TLT, section 5 (threshold, Algorithm 1), Table 4 (which sizes suit which batches) and section 6.3 (topK fixed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.budgets.base import BaseBudget
from vllm_specrollout.budgets.papers.bandit import BucketedBandit, Draw
from vllm_specrollout.budgets.papers.plans import Strategy, everything_within, no_drafts, tree_limits
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.config.budgets import TltOptions
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, StepRecord, StepTiming, TreeBatch

# Table 4: of 64 tokens to verify, all are best at batch 1, 48 at 2 and 4, 16 from 8 on
_THRESHOLDS = (1, 2, 8)
_SHARES = (1.0, 0.75, 0.25)


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


class TltBudget(BaseBudget):
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
        super().__init__(max_nodes, max_depth)
        self.options = options or TltOptions()
        self.cost = cost or StepCost()
        self.strategies = strategies_for(max_nodes, max_depth, self.options)
        self.bandit: BucketedBandit[StepTiming] = BucketedBandit(
            _THRESHOLDS,
            [len(group) for group in self.strategies],
            self.reward,
            epsilon=self.options.epsilon,
            window=self.options.window,
            rng=rng,
        )
        self._draw: Draw | None = None  # of the limits given last

    def reward(self, step: StepTiming) -> float:
        """How many times as fast as plain decoding a step was.

        Algorithm 1 has (accepted / batch + 1) * batch / elapsed, tokens per millisecond. That grows with the batch, so
        an arm seen at the larger batches of a bucket would look better; and divided by the batch, worse. So it is
        divided by what plain decoding yields at that very batch: tokens * plain_ms(batch) / (batch * step_ms).
        """
        return step.tokens * self.cost.plain_ms(step.batch, step.context) / (max(step.batch, 1) * step.step_ms)

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

    def seed(self, timings: Sequence[StepTiming]) -> None:
        self.cost.seed(timings)
