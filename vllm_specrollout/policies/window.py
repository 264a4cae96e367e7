"""RhymeRL's draft window per answer, as a budget. What belongs here: windows, and when a batch is too large for them.

Source: RhymeRL, section 5.4 (HistoSpec).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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

_MEMORY = 0.98  # weight left to a draft's acceptance after each further one: about the last fifty drafts count
_PROBE_EVERY = 32  # steps without drafts after which one is tried: acceptance changes, also while nobody looks


class WindowBudget:
    """Each answer has a window: 2 tokens at first, 2 more after each draft accepted whole, 2 again after a rejection.

    Chains only, as in the paper. It switches drafting off above a largest batch that a profile gives for each rate of
    acceptance; here the profile is the cost model, learned while the engine runs.

    Args:
        max_nodes, max_depth: the engine's limits; they cap the window too.
        start: window of a new answer, and after a rejection, in tokens.
        step: how much it grows after a draft that was accepted whole, in tokens.
        cap: largest window, in tokens.
    """

    def __init__(self, max_nodes: int, max_depth: int, *, start: int = 2, step: int = 2, cap: int = 32) -> None:
        self.start, self.step = start, step
        self.cap = min(cap, max_nodes, max_depth)
        self.cost = StepCost()
        self.windows: dict[str, int] = {}
        # of recent drafts: tokens drafted and accepted per draft
        self._drafted, self._accepted = float(start), float(start)
        self._off = 0  # steps since drafting was switched off
        self._choice: Choice | None = None

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        if not self._pays(len(views)):
            self._off += 1
            if self._off % _PROBE_EVERY:
                self._choice = Choice(False, "batch too large", 0)
                return [Decision(0, 0, Shape.OFF, reason="the batch is too large for this acceptance")] * len(views)
        else:
            self._off = 0
        return [self._decide_one(view) for view in views]

    def _decide_one(self, view: RequestView) -> Decision:
        window = min(self.windows.setdefault(view.request_id, self.start), self.cap)
        decision = may_draft(view, window, window, "window")
        return decision if decision.shape is Shape.OFF else replace(decision, shape=Shape.CHAIN)

    def _pays(self, batch: int) -> bool:
        """Whether a step with typical drafts yields more tokens per millisecond than one without."""
        if not batch or not self.cost.is_fitted:
            return True
        nodes = round(batch * self._drafted)
        drafted_ms = self.cost.predict(batch + nodes, nodes)
        return (1.0 + self._accepted) / drafted_ms >= 1.0 / self.cost.predict(batch)

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        # several drafters' chains laid over each other may branch: the best line of them is the window's
        chosen = [
            prune(tree, decision) if tree.size else EMPTY_TREE for tree, decision in zip(trees, decisions, strict=True)
        ]
        self._choice = Choice(True, "probe" if self._off else "window", sum(tree.size for tree in chosen))
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        for item in feedback:
            is_whole = item.accepted == item.drafted
            window = self.windows.get(item.request_id, self.start)
            self.windows[item.request_id] = min(window + self.step, self.cap) if is_whole else self.start
            self._drafted += (1.0 - _MEMORY) * (item.drafted - self._drafted)
            self._accepted += (1.0 - _MEMORY) * (item.accepted - self._accepted)
        if timing is not None:
            self.cost.observe(timing)

    def finish(self, ending: Ending) -> None:
        self.windows.pop(ending.request_id, None)
