"""The step in two halves: settle() after the forward pass, prepare() before the next. Protocols only, no engine.

What belongs here: the order in which policies and drafters are asked, and what happens when one of them fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.policies.budget import Policy, rests
from vllm_specrollout.trees.build import union
from vllm_specrollout.types import EMPTY_TREE, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming

logger = logging.getLogger("vllm.specrollout")


Unite = Callable[[Sequence[Sequence[DraftTree]], Sequence[int]], list[DraftTree]]
"""One tree per group of trees, of at most so many nodes each: what `unite_naively` answers, however it is computed."""


def unite_naively(groups: Sequence[Sequence[DraftTree]], max_nodes: Sequence[int]) -> list[DraftTree]:
    """The specification: the union of each group's trees, one after the other."""
    return [union(group, most) for group, most in zip(groups, max_nodes, strict=True)]


class Speculation:
    """Drafters and policy of one engine; `unite` is how several drafters' trees for a request become one."""

    def __init__(self, drafters: Sequence[Drafter], policy: Policy, unite: Unite = unite_naively) -> None:
        self.drafters = list(drafters)
        self.policy = policy
        self.unite = unite

    def settle(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """Tell everybody what became of the last drafts, and what the last completed step cost."""
        self.policy.observe(feedback, timing)
        if feedback:
            for drafter in list(self.drafters):
                try:
                    drafter.observe(feedback)
                except Exception:
                    self._drop(drafter)

    def rests(self, batch: int) -> bool:
        """Whether the next step is known to go without drafts; if so, it need not be prepared. Asked once per step."""
        return rests(self.policy, batch)

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
        return self.policy.choose(self._united(proposals, decisions), decisions)

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

    def _united(self, proposals: Sequence[Sequence[DraftTree]], decisions: Sequence[Decision]) -> list[DraftTree]:
        """One tree per request; what a single drafter proposed passes unchanged."""
        trees = [EMPTY_TREE] * len(decisions)
        places: list[int] = []
        groups: list[list[DraftTree]] = []
        for i in range(len(decisions)):
            own = [p[i] for p in proposals if p[i].size]
            if len(own) == 1:
                trees[i] = own[0]
            elif own:
                places.append(i)
                groups.append(own)
        if groups:
            united = self.unite(groups, [decisions[i].max_nodes for i in places])
            for i, tree in zip(places, united, strict=True):
                trees[i] = tree
        return trees

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
