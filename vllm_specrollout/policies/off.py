"""The budget that never drafts: plain decoding through the same engine, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

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

FOR_GOOD = 1 << 30
"""Steps; more than any engine runs."""


class OffBudget:
    """Drafts nothing, whatever the engine's limits are."""

    def __init__(self) -> None:
        self._choice: Choice | None = None

    def rests(self, batch: int) -> bool:
        self._choice = Choice(False, "off", 0)
        return True

    def rest_left(self) -> int:
        return FOR_GOOD

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self._choice = Choice(False, "off", 0)
        return [Decision(0, 0, Shape.OFF, reason="off")] * len(views)

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [EMPTY_TREE] * len(trees)

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        """Nothing to learn."""

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""
