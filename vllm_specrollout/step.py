"""The step in two halves: settle() after the forward pass, prepare() before the next. Protocols only, no engine.

What belongs here: the order in which policies and drafters are asked, and what happens when one of them fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.policies.budget import Policy
from vllm_specrollout.trees.build import union
from vllm_specrollout.types import EMPTY_TREE, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming

logger = logging.getLogger("vllm.specrollout")


class Speculation:
    """Drafters and policy of one engine."""

    def __init__(self, drafters: Sequence[Drafter], policy: Policy) -> None:
        self.drafters = list(drafters)
        self.policy = policy

    def settle(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """Tell everybody what became of the last drafts, and what the last completed step cost."""
        self.policy.observe(feedback, timing)
        if feedback:
            for drafter in list(self.drafters):
                try:
                    drafter.observe(feedback)
                except Exception:
                    self._drop(drafter)

    def prepare(self, views: Sequence[RequestView]) -> list[DraftTree]:
        """Draft trees for the next step, one per view, in order."""
        decisions = self.policy.decide(views)
        if not any(d.max_nodes for d in decisions):
            return [EMPTY_TREE] * len(views)
        proposals = [
            p for drafter in list(self.drafters) if (p := self._propose(drafter, views, decisions)) is not None
        ]
        if not proposals:
            return [EMPTY_TREE] * len(views)
        trees = []
        for i, decision in enumerate(decisions):
            own = [p[i] for p in proposals if p[i].size]
            trees.append(own[0] if len(own) == 1 else union(own, decision.max_nodes) if own else EMPTY_TREE)
        return self.policy.choose(trees, decisions)

    def finish(self, ending: Ending) -> None:
        """A request is over; `forget` follows."""
        self.policy.finish(ending)
        for drafter in list(self.drafters):
            try:
                drafter.finish(ending)
            except Exception:
                self._drop(drafter)

    def forget(self, request_id: str) -> None:
        for drafter in self.drafters:
            drafter.forget(request_id)

    def _propose(
        self, drafter: Drafter, views: Sequence[RequestView], decisions: Sequence[Decision]
    ) -> list[DraftTree] | None:
        try:
            return drafter.propose(views, decisions)
        except Exception:
            self._drop(drafter)
            return None

    def _drop(self, drafter: Drafter) -> None:
        """A drafter that fails costs speed, never tokens: the engine goes on without it."""
        logger.exception("Drafter %r failed and is switched off; requests go on without its drafts", drafter.name)
        self.drafters = [d for d in self.drafters if d is not drafter]
