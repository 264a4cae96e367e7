"""How many draft tokens each running request gets in the next step."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.types import Decision, Feedback, RequestView, Shape, StepTiming


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
    """Always drafts up to the configured size; for benchmarks, and for those who know better."""

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes = max_nodes
        self.max_depth = max_depth

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return [may_draft(view, self.max_nodes, self.max_depth, "fixed budget") for view in views]

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming) -> None:
        """A fixed budget learns nothing."""


def make_policy(config: SpecRolloutConfig) -> FixedBudget:
    """The policy a configuration asks for."""
    return FixedBudget(config.max_draft_tokens, config.max_depth)
