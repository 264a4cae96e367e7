"""The step in two halves: settle() after the forward pass, prepare() before the next. Protocols only, no engine.

What belongs here: the order in which budget and drafters are asked, what they hand over being looked at, and what
happens when one of them fails. Nothing that fails here reaches the engine: the step goes on without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_specrollout import _core
from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.guard import CONTAINED, Guard
from vllm_specrollout.history.vocabulary import ANY_TOKEN
from vllm_specrollout.policies.budget import Policy, rest_left, rests
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.trees.build import first_nodes, order, union
from vllm_specrollout.types import EMPTY_TREE, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming

Answer = TypeVar("Answer")

Unite = Callable[[Sequence[Sequence[DraftTree]], Sequence[int]], list[DraftTree]]
"""One tree per group of trees, of at most so many nodes each: what `unite_naively` answers, however it is computed."""

_PLAIN = "requests go on without its drafts"


def unite_naively(groups: Sequence[Sequence[DraftTree]], max_nodes: Sequence[int]) -> list[DraftTree]:
    """The specification: the union of each group's trees, one after the other."""
    return [union(group, most) for group, most in zip(groups, max_nodes, strict=True)]


class Speculation:
    """Drafters and policy of one engine.

    Args:
        unite: how several drafters' trees for a request become one.
        vocab_size: the model's; a drafter that proposes a token outside of it has failed.
        guard: contains failures; default: as strict as the environment says.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        unite: Unite = unite_naively,
        *,
        vocab_size: int = ANY_TOKEN,
        guard: Guard | None = None,
    ) -> None:
        self.guard = guard if guard is not None else Guard()
        self.drafters = list(drafters)
        self.policy = policy
        self.unite = unite
        self.vocab_size = vocab_size
        self.has_proposals = False
        """Whether there was anything to choose from when the step was last prepared."""

    def settle(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """Tell everybody what became of the last drafts, and what the last completed step cost."""
        self._policy_does(lambda policy: policy.observe(feedback, timing))
        if feedback:
            for drafter in list(self.drafters):
                self._drafter_does(drafter, lambda drafter: drafter.observe(feedback))

    def rests(self, batch: int) -> bool:
        """Whether the next step is known to go without drafts; if so, it need not be prepared. Asked once per step."""
        is_resting = self._policy_does(lambda policy: rests(policy, batch))
        return True if is_resting is None else is_resting

    def rest_left(self) -> int:
        """How many of the coming steps are known to go without drafts."""
        left = self._policy_does(rest_left)
        return 0 if left is None else left

    def prepare(self, views: Sequence[RequestView]) -> list[DraftTree]:
        """Draft trees for the next step, one per view, in order."""
        self.has_proposals = False
        plain = [EMPTY_TREE] * len(views)
        decisions = self._policy_does(lambda policy: _one_each(policy.decide(views), len(views)))
        if decisions is None or not any(d.max_nodes for d in decisions):
            return plain
        proposals = [
            trees
            for drafter in list(self.drafters)
            if (trees := self._drafter_does(drafter, lambda d: self._proposed(d, views, decisions))) is not None
        ]
        if not proposals:
            return plain
        united: list[DraftTree] | None = None
        with self.guard.over("merging drafts", "requests go on without drafts in such a step"):
            united = self._united(proposals, decisions)
        if united is None:
            return plain
        self.has_proposals = any(tree.size for tree in united)
        chosen = self._policy_does(lambda policy: self._sound(policy.choose(united, decisions), len(views)))
        return plain if chosen is None else chosen

    def finish(self, ending: Ending) -> None:
        """A request is over; `forget` follows."""
        self._policy_does(lambda policy: policy.finish(ending))
        for drafter in list(self.drafters):
            self._drafter_does(drafter, lambda drafter: drafter.finish(ending))

    def forget(self, request_id: str) -> None:
        for drafter in list(self.drafters):
            self._drafter_does(drafter, lambda drafter: drafter.forget(request_id))

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

    def _proposed(
        self, drafter: Drafter, views: Sequence[RequestView], decisions: Sequence[Decision]
    ) -> list[DraftTree]:
        """What a drafter proposes, put right where it is not sorted or far too large. Raises: it is not trees."""
        trees = _one_each(drafter.propose(views, decisions), len(views))
        for i in _core.check_trees(trees, self.vocab_size):
            trees[i] = order(trees[i])
        return [first_nodes(tree, MAX_NODES) for tree in trees]

    def _sound(self, trees: Sequence[DraftTree], count: int) -> list[DraftTree]:
        """What the policy chose: nobody looks at it again before the target computes it."""
        chosen = _one_each(trees, count)
        _core.check_trees(chosen, self.vocab_size)
        return chosen

    # --- failures ----------------------------------------------------------------------------------------------------

    def _drafter_does(self, drafter: Drafter, what: Callable[[Drafter], Answer]) -> Answer | None:
        """None: it failed, and is switched off."""
        try:
            return what(drafter)
        except CONTAINED as error:
            self.drafters = [d for d in self.drafters if d is not drafter]
            self.guard.failed(f"drafter {drafter.name}", error, f"it is switched off, and {_PLAIN}")
            return None

    def _policy_does(self, what: Callable[[Policy], Answer]) -> Answer | None:
        """None: it failed, and drafting is switched off."""
        try:
            return what(self.policy)
        except CONTAINED as error:
            failed, self.policy = self.policy, OffBudget()
            self.guard.failed("budget", error, "drafting is switched off")
            with self.guard.over("closing the budget", "its trace may lack its end"):
                close = getattr(failed, "close", None)
                if close is not None:
                    close()
            return None


def _one_each(answers: Sequence[Answer], count: int) -> list[Answer]:
    """The answers as a list of their own. Raises: it is no list, or not one for each request."""
    if not isinstance(answers, (list, tuple)):
        raise TypeError(f"{type(answers).__name__} in the place of a list")
    if len(answers) != count:
        raise ValueError(f"{len(answers)} answers for {count} requests")
    return list(answers)
