"""How many draft tokens each running request gets in the next step.

A policy decides before the drafters propose (`decide`), and picks what is worth verifying afterwards (`choose`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import (
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
    """Decides how much to draft. Pure: numbers in, numbers out.

    A policy may also have `rests(batch) -> bool` and `rest_left() -> int`, see the functions of these names below.
    """

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


def rests(policy: Policy, batch: int) -> bool:
    """Whether the next step goes without drafts, whichever requests are in it.

    Asked once per step, before its requests are looked at; if so, the policy's `decide` is not called for that step.
    What costs nothing here is free: with large batches, looking at all requests takes a noticeable part of a step.
    """
    own = getattr(policy, "rests", None)
    return own is not None and bool(own(batch))


def rest_left(policy: Policy) -> int:
    """For how many of the coming engine steps `rests` is known to be True.

    Where the next step is scheduled before this one's tokens are known, the scheduler has to know that much ahead.
    """
    own = getattr(policy, "rest_left", None)
    return 0 if own is None else int(own())


def may_draft(view: RequestView, max_nodes: int, max_depth: int, reason: str = "") -> Decision:
    """The most that makes sense for a request: nothing beyond its last token, nothing its kind forbids.

    A draft d levels deep yields up to d + 1 tokens, so a request that may still generate m tokens needs m - 1 levels.
    """
    return _within(min(max_nodes, view.max_draft_tokens), min(max_depth, view.max_new_tokens - 1), view.shape, reason)


@functools.lru_cache(maxsize=4096)
def _within(max_nodes: int, max_depth: int, shape: Shape, reason: str) -> Decision:
    """Most requests of most steps get the same decision: it is made once."""
    if max_depth <= 0 or shape is Shape.OFF or max_nodes <= 0:
        return Decision(0, 0, Shape.OFF, reason=reason or "nothing to draft")
    nodes = min(max_nodes, max_depth) if shape is Shape.CHAIN else max_nodes
    return Decision(nodes, max_depth, shape, reason=reason)


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
