"""SpecActor's draft window for the whole batch, and own windows for requests that are accepted less than most.

Source: SpecActor, section 4.1: the model of TGS, Algorithm 1 (as far as it chooses w) and Algorithm 2. This is the
coupled form: drafting and verification take turns. The decoupled one, where they overlap, is not built yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
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

_REPLAN_TOKENS = 1000
_MEMORY = 0.998  # weight left to a token's acceptance after each further one: about the last 500 count
_PRIOR_P = 0.7
_PRIOR_TOKENS = 8.0  # tokens of its own that a request's acceptance needs to weigh as much as the batch's


@dataclass(slots=True)
class _Tally:
    """Drafted tokens that the target reached, and accepted ones."""

    tried: float = 0.0
    accepted: float = 0.0


def tokens_per_step(p: float, w: int) -> float:
    """tau_w: tokens a request is expected to gain from one step with w drafted tokens, each accepted with p.

    The paper's P(a, w) is p^a (1 - p) for a < w and p^w for a = w. Its tau_w for decoupled execution counts (a + 1) / 2
    for a partly accepted window, since the window drafted meanwhile is lost, and w for a whole one. In coupled
    execution nothing is drafted meanwhile, and each verification yields its a accepted tokens and one of the target's
    own: the sum of P(a, w) (a + 1), which is (1 - p^(w+1)) / (1 - p).
    """
    return float(w + 1) if p >= 1.0 else (1.0 - p ** (w + 1)) / (1.0 - p)


class SpecActorBudget:
    """Chains of the window w that maximises TGS = b * tau_w / (w * D + V).

    V is the cost model's time of a step with b * (w + 1) rows (in the paper affine in b for each w), what host drafters
    take per step included. p is the batch's acceptance per token, measured. Windows are planned at the first step
    and again after every 1000 generated tokens (`replan`): one for the batch; and for each request whose acceptance is
    below the batch's, the one that is best for its own p and b = 1. As in the paper a window is 1 at least.

    Args:
        max_nodes, max_depth: the engine's limits; they cap the window.
        draft_ms: D, milliseconds per drafted token and step for the whole batch; 0 where drafts are looked up.
    """

    def __init__(self, max_nodes: int, max_depth: int, *, draft_ms: float = 0.0) -> None:
        self.longest = min(max_nodes, max_depth)
        self.draft_ms = draft_ms
        self.cost = StepCost()
        self.window = 1
        # request -> its own window
        self.own: dict[str, int] = {}
        self._batch = _Tally(_PRIOR_TOKENS, _PRIOR_P * _PRIOR_TOKENS)
        self._requests: dict[str, _Tally] = {}
        self._tokens = _REPLAN_TOKENS  # generated since the last plan
        self._choice: Choice | None = None

    @property
    def acceptance(self) -> float:
        """p of the batch."""
        return self._batch.accepted / self._batch.tried

    def acceptance_of(self, request_id: str) -> float:
        """p of one request, drawn towards the batch's while little was tried."""
        tally = self._requests.get(request_id, _Tally())
        return (tally.accepted + _PRIOR_TOKENS * self.acceptance) / (tally.tried + _PRIOR_TOKENS)

    def best_window(self, p: float, batch: int) -> int:
        """The w, 1 to the engine's limit, with the largest TGS; the smallest of several."""

        def speed(w: int) -> float:
            verify_ms = self.cost.predict(batch * (w + 1), batch * w, 0)
            return tokens_per_step(p, w) * batch / (w * self.draft_ms + verify_ms)

        return max(range(1, self.longest + 1), key=speed)

    def replan(self, request_ids: Sequence[str]) -> None:
        """Set the windows anew for these running requests."""
        self._tokens = 0
        p = self.acceptance
        self.window = self.best_window(p, max(len(request_ids), 1))
        below = {name: own for name in request_ids if (own := self.acceptance_of(name)) < p}
        self.own = {name: self.best_window(own, 1) for name, own in below.items()}

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        if self._tokens >= _REPLAN_TOKENS and views:
            self.replan([view.request_id for view in views])
        decisions = [self._decide_one(view) for view in views]
        if not any(decision.max_nodes for decision in decisions):
            self._choice = Choice(False, "nothing to draft", 0)
        return decisions

    def _decide_one(self, view: RequestView) -> Decision:
        own = self.own.get(view.request_id)
        window = self.window if own is None else own
        decision = may_draft(view, window, window, "specactor: window" if own is None else "specactor: own window")
        return decision if decision.shape is Shape.OFF else replace(decision, shape=Shape.CHAIN)

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        chosen = [
            prune(tree, decision) if tree.size else EMPTY_TREE for tree, decision in zip(trees, decisions, strict=True)
        ]
        drafting = [tree.size for tree in chosen if tree.size]
        p, plain_rows, nodes = self.acceptance, len(trees), sum(drafting)
        self._choice = Choice(
            True,
            "own windows" if self.own else "window",
            nodes,
            sum(tokens_per_step(p, size) - 1.0 for size in drafting),
            self.cost.predict(plain_rows + nodes, nodes, 0),
            self.cost.predict(plain_rows, 0, 0),
        )
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        for item in feedback:
            # a chain's tokens are tried in turn, up to the first that is rejected
            tried = min(item.accepted + 1, item.drafted)
            fading = _MEMORY**tried
            for tally in (self._batch, self._requests.setdefault(item.request_id, _Tally())):
                tally.tried = fading * tally.tried + tried
                tally.accepted = fading * tally.accepted + item.accepted
        if timing is not None:
            self._tokens += timing.tokens
            self.cost.observe(timing)

    def finish(self, ending: Ending) -> None:
        self._requests.pop(ending.request_id, None)
        self.own.pop(ending.request_id, None)
