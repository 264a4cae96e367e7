"""How many draft tokens each running request gets in the next step.

A policy decides before the drafters propose (`decide`), and picks what is worth verifying afterwards (`choose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from vllm_specrollout.policies.calibration import Calibration
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.trees.build import cumulative_log_q, is_ordered, num_paths, order
from vllm_specrollout.trees.prune import prune
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


class Policy(Protocol):
    """Decides how much to draft. Pure: numbers in, numbers out."""

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        """One decision per view, in order."""
        ...

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        """What of the proposed trees is verified."""
        ...

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """What became of the last drafts, and what the last completed step cost (None: not known)."""
        ...

    def finish(self, ending: Ending) -> None:
        """A request is over."""
        ...

    def explain(self) -> Choice | None:
        """What the last `choose` (or a `decide` that forbade all drafts) came to; None before the first."""
        ...


def may_draft(view: RequestView, max_nodes: int, max_depth: int, reason: str = "") -> Decision:
    """The most that makes sense for a request: nothing beyond its last token, nothing its kind forbids.

    A draft d levels deep yields up to d + 1 tokens, so a request that may still generate m tokens needs m - 1 levels.
    """
    max_nodes = min(max_nodes, view.max_draft_tokens)
    depth = min(max_depth, view.max_new_tokens - 1)
    if depth <= 0 or view.shape is Shape.OFF or max_nodes <= 0:
        return Decision(0, 0, Shape.OFF, reason=reason or "nothing to draft")
    nodes = min(max_nodes, depth) if view.shape is Shape.CHAIN else max_nodes
    return Decision(nodes, depth, view.shape, reason=reason)


class FixedBudget:
    """Always verifies up to the configured size; for benchmarks, and for those who know better."""

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self._choice: Choice | None = None

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return [may_draft(view, self.max_nodes, self.max_depth, "fixed budget") for view in views]

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        chosen = [prune(tree, decision) if tree.size else tree for tree, decision in zip(trees, decisions, strict=True)]
        self._choice = Choice(True, "fixed", sum(tree.size for tree in chosen))
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """A fixed budget learns nothing."""

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""


class AutoBudget:
    """Verifies a node while it pays: see docs/concepts/budget.md.

    With r tokens per millisecond in reach without it, a node that is accepted with probability p (all its ancestors
    included) and costs c milliseconds is worth verifying if p / c > r. A step whose drafts together do not earn their
    fixed cost is run plain. Costs are learned from the engine's own steps, probabilities from its own acceptance.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.cost = StepCost()
        self.calibration = Calibration()
        self._rate = 0.0  # tokens per millisecond of recent steps
        self._choice: Choice | None = None

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return [may_draft(view, self.max_nodes, self.max_depth, "auto budget") for view in views]

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        batch = len(trees)
        plain_ms = self.cost.predict(batch)
        threshold = min(self.cost.row * max(batch / plain_ms, self._rate), 1.0)
        chosen: list[DraftTree] = []
        gain, nodes, branches = 0.0, 0, 0
        for tree, decision in zip(trees, decisions, strict=True):
            kept, expected = self._cut(tree, decision, threshold) if tree.size else (tree, 0.0)
            chosen.append(kept)
            if kept.size:
                gain += expected
                nodes += kept.size
                branches += num_paths(kept.parents) - 1
        self._choice = Choice(True, "nothing pays", 0, 0.0, plain_ms, plain_ms)
        if not nodes:
            return chosen
        drafted_ms = self.cost.predict(batch + nodes, nodes, branches)
        if (batch + gain) / drafted_ms <= batch / plain_ms:
            return [EMPTY_TREE] * len(trees)
        self._choice = Choice(True, "pays", nodes, gain, drafted_ms, plain_ms)
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def _cut(self, tree: DraftTree, decision: Decision, threshold: float) -> tuple[DraftTree, float]:
        """What pays of one tree, and the tokens it is expected to add; the drafter's own log_q stays in the tree."""
        numbered = DraftTree(
            tree.token_ids,
            tree.parents,
            self.calibration.log_probability(tree),
            np.arange(tree.size, dtype=np.int32),  # in place of the source: tells below which nodes were kept
        )
        if not is_ordered(numbered):
            numbered = order(numbered)
        path_cost = self.cost.branch / self.cost.row
        bounds = replace(decision, min_probability=threshold, path_cost=path_cost)
        kept = prune(numbered, bounds)
        if not kept.size:
            return EMPTY_TREE, 0.0
        expected = float(np.exp(cumulative_log_q(kept)).sum())
        return DraftTree(kept.token_ids, kept.parents, tree.log_q[kept.source], tree.source[kept.source]), expected

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self.calibration.observe(feedback)
        if timing is None:
            return
        self.cost.observe(timing)
        if timing.is_decode_only and timing.step_ms > 0.0:
            rate = timing.tokens / timing.step_ms
            self._rate += 0.1 * (rate - self._rate)

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""
