"""A budget for which drafts never pay, and a drafter that always has some: when are they asked again?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.switch import Switch
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
    chain,
)

# asked in each of the first 16 steps, then after pauses of 8, 16, 32 and 64
GAPS = [1] * 15 + [9, 17, 33, 65]
STEPS = 1 + sum(GAPS)


class NeverPays:
    """The default budget's switch, told each time that drafting loses; clocks have no say in it.

    Args:
        step: the number of the engine step in progress.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.switch = Switch()
        self.asked_at: list[int] = []
        self._step = step

    def rests(self, batch: int) -> bool:
        return self.switch.is_resting and not self.switch.asks()

    def rest_left(self) -> int:
        return self.switch.rest_left

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        if not self.switch.asks():
            return [Decision(0, 0, Shape.OFF)] * len(views)
        self.asked_at.append(self._step())
        return [may_draft(view, 4, 4) for view in views]

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        assert any(tree.size for tree in trees)
        self.switch.judge(-1.0)
        return [EMPTY_TREE] * len(trees)

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def explain(self) -> Choice | None:
        return None

    @property
    def gaps(self) -> list[int]:
        """Engine steps from each time that drafters were asked to the next."""
        return [after - before for before, after in zip(self.asked_at, self.asked_at[1:], strict=False)]


class Always:
    """Proposes the same chain for everybody, or nothing at all."""

    name = "always"

    def __init__(self, tokens: Sequence[int] = (7, 8)) -> None:
        self.tokens = list(tokens)

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [chain(self.tokens[: decision.max_depth]) for decision in decisions]

    def observe(self, feedback: Sequence[Feedback]) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def forget(self, request_id: str) -> None: ...
