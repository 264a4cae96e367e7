"""DAS's draft budget per length class. What belongs here: from a class to a number of nodes.

Source: DAS ("Spending the Draft Budget on the Long Tail"). It maps the classes Long, Medium and Short to budgets with a
formula from a linear latency model, without giving the formula; the one used here is derived below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.policies.length import LengthClass, Lengths
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import Choice, Decision, DraftTree, Ending, Feedback, RequestView, Shape, Status, StepTiming

_MEMORY = 0.98  # weight left to a draft's acceptance after each further one
_PRIOR_ACCEPTANCE = 0.7


class DasBudget:
    """Long answers get the draft that ends them soonest, medium ones half of it, short ones none.

    With a step of f + r * rows milliseconds, B running requests and a tokens accepted with probability p each in turn,
    an answer that still needs R tokens takes R / E(k) steps, E(k) = (1 - p^(k+1)) / (1 - p), when k are drafted. Its
    time is least at the k with the least (f + r * (B + k)) / E(k): for the answer that ends the step, that is the
    makespan.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.cost = StepCost()
        self.lengths = Lengths()
        self.acceptance = _PRIOR_ACCEPTANCE
        self._choice: Choice | None = None

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        most = self.best_size(len(views))
        sizes = {LengthClass.LONG: most, LengthClass.MEDIUM: most // 2, LengthClass.SHORT: 0}
        decisions = []
        for view in views:
            generated = len(view.token_ids) - view.num_prompt_tokens
            kind = self.lengths.classify(view.problem_id, generated, generated + view.max_new_tokens)
            decision = may_draft(view, sizes[kind], self.max_depth, f"das: {kind.value}")
            decisions.append(decision if decision.shape is Shape.OFF else replace(decision, shape=Shape.CHAIN))
        return decisions

    def best_size(self, batch: int) -> int:
        """The number of draft tokens, 0 to the engine's limit, that ends one answer among `batch` soonest."""
        p = min(self.acceptance, 0.999)

        def time_per_token(k: int) -> float:
            return self.cost.predict(batch + k, k) * (1.0 - p) / (1.0 - p ** (k + 1))

        return min(range(min(self.max_nodes, self.max_depth) + 1), key=time_per_token)

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        chosen = [prune(tree, decision) if tree.size else tree for tree, decision in zip(trees, decisions, strict=True)]
        self._choice = Choice(True, "length class", sum(tree.size for tree in chosen))
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        for item in feedback:
            # a chain's tokens are tried in turn, up to the first that is rejected
            tried = min(item.accepted + 1, item.drafted)
            for i in range(tried):
                self.acceptance += (1.0 - _MEMORY) * (float(i < item.accepted) - self.acceptance)
        if timing is not None:
            self.cost.observe(timing)

    def finish(self, ending: Ending) -> None:
        if ending.status is not Status.ABORTED:  # its length says nothing of where it was going
            self.lengths.observe(ending.problem_id, len(ending.token_ids))
