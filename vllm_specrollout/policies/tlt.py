"""TLT's adaptive drafting: a bandit picks depth, top-k and size for the batch at hand, below a largest batch.

Source: TLT, section 5 (threshold 32, Algorithm 1) and Table 4 (which sizes suit which batches).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from vllm_specrollout.policies.bandit import BucketedBandit, Draw
from vllm_specrollout.policies.branching import Strategy, within
from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.types import (
    EMPTY_TREE,
    Choice,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
    StepTiming,
)

# Table 4: of 64 tokens to verify, all are best at batch 1, 48 at 2 and 4, 16 from 8 on
_THRESHOLDS = (1, 2, 8)
_SHARES = (1.0, 0.75, 0.25)
_TOP_K = 4


def strategies_for(max_nodes: int, max_depth: int) -> list[list[Strategy]]:
    """Arms of each bucket: one size per bucket, in full, half and quarter depth, and a chain."""
    groups = []
    for share in _SHARES:
        nodes = max(1, round(share * max_nodes))
        deepest = min(nodes, max_depth)
        trees = [Strategy(nodes, max(1, deepest // part), _TOP_K) for part in (1, 2, 4)]
        # small limits make some of them the same: an arm counts once
        groups.append(list(dict.fromkeys([*trees, Strategy(deepest, deepest, 1)])))
    return groups


class TltBudget:
    """Drafts below `threshold` running requests, by the strategy that has earned most tokens per millisecond.

    Args:
        max_nodes, max_depth: the engine's limits; strategies are shares of them.
        rng: the bandit's source of chance.
        threshold: batches of so many requests or more decode plainly.
        epsilon, window: see `BucketedBandit`.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        *,
        rng: np.random.Generator,
        threshold: int = 32,
        epsilon: float = 0.1,
        window: int = 16,
    ) -> None:
        self.threshold = threshold
        self.strategies = strategies_for(max_nodes, max_depth)
        self.bandit = BucketedBandit(
            _THRESHOLDS, [len(group) for group in self.strategies], epsilon=epsilon, window=window, rng=rng
        )
        self._draw: Draw | None = None  # of the step to come; None: that step is nobody's
        self._credit = _Credit()
        self._weights_version: int | None = None
        self._choice: Choice | None = None

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self._note_weights(views)
        self._draw = None
        if len(views) >= self.threshold:
            self._choice = Choice(False, "large batch", 0)
            return [Decision(0, 0, Shape.OFF, reason="tlt: large batch")] * len(views)
        draw = self.bandit.draw(len(views))
        strategy = self.strategies[draw.bucket][draw.arm]
        decisions = [may_draft(view, strategy.nodes, strategy.depth, f"tlt: {draw.reason}") for view in views]
        if any(decision.max_nodes for decision in decisions):
            self._draw = draw
        else:
            self._choice = Choice(False, "nothing to draft", 0)
        return decisions

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        draw = self._draw
        if draw is None:
            return [EMPTY_TREE] * len(trees)
        chosen = within(trees, decisions, self.strategies[draw.bucket][draw.arm].top_k)
        self._choice = Choice(True, draw.reason, sum(tree.size for tree in chosen))
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """Reward the arm that drafted the step which the timing is of, with that step's tokens per millisecond.

        On a step without prompts this is the paper's reward: (accepted / batch + 1) * batch / elapsed.
        """
        self._credit.step_done(self._draw, sum(item.drafted for item in feedback))
        self._draw = None
        draw = self._credit.of(timing) if timing is not None else None
        if draw is not None and timing is not None and timing.is_decode_only and timing.step_ms > 0.0:
            self.bandit.record(draw, timing.batch, timing.tokens / timing.step_ms)

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""

    def _note_weights(self, views: Sequence[RequestView]) -> None:
        """New weights change what is accepted: look around again."""
        version = max((view.weights_version for view in views), default=None)
        if version is not None and version != self._weights_version:
            if self._weights_version is not None:
                self.bandit.restart()
            self._weights_version = version


class _Credit:
    """Which draw a step's timing belongs to.

    Feedback is of the step just done. A timing is of that step (V2 runner) or of the one before, whose end was not
    known yet (V1 runner). The number of draft nodes tells which; where it fits both, what it told last.
    """

    def __init__(self) -> None:
        # (draw, nodes verified) of the last two steps, newest last
        self._steps: deque[tuple[Draw | None, int]] = deque([(None, 0), (None, 0)], maxlen=2)
        self._is_late = True

    def step_done(self, draw: Draw | None, nodes: int) -> None:
        self._steps.append((draw, nodes))

    def of(self, timing: StepTiming) -> Draw | None:
        """None: the step had no drafts, or nobody knows whose they were."""
        before, now = self._steps
        fits_before, fits_now = before[1] == timing.nodes, now[1] == timing.nodes
        if fits_before != fits_now:
            self._is_late = fits_before
        elif not fits_before:
            return None
        return (before if self._is_late else now)[0] if timing.nodes else None
