"""Steps as listeners ask about them: their plans, why these are as they are, and what each request verified."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from vllm_specrollout.types import StepPlan, StepRecord

Note = TypeVar("Note")

_MOST_OPEN = 64
"""Plans without a record that are remembered; more than any engine has steps in flight."""


class OpenPlans(Generic[Note]):
    """A listener's notes on plans whose steps are not over.

    A plan may never become a step, for instance when all its requests have ended: it goes when a later one's record
    comes.
    """

    def __init__(self) -> None:
        self._notes: deque[tuple[StepPlan, Note]] = deque(maxlen=_MOST_OPEN)
        self.num_added = 0
        """Plans so far."""

    @property
    def num_gone(self) -> int:
        """Plans so far whose records have come, or will never come."""
        return self.num_added - len(self._notes)

    def add(self, plan: StepPlan, note: Note) -> None:
        self._notes.append((plan, note))
        self.num_added += 1

    def take(self, plan: StepPlan | None) -> Note | None:
        """The note on this very plan, which goes, as older ones do; None: there is none."""
        if any(one is plan for one, _ in self._notes):
            while True:
                oldest, note = self._notes.popleft()
                if oldest is plan:
                    return note
        return None

    def take_all(self) -> list[Note]:
        """The notes that are left, the oldest first; they go."""
        notes = [note for _, note in self._notes]
        self._notes.clear()
        return notes


def why(plan: StepPlan) -> str:
    """The plan's reason; an `off` before it, where drafters were not even asked."""
    return plan.reason if plan.is_on or plan.reason == "off" else f"off: {plan.reason}"


def verified_by_request(record: StepRecord) -> dict[str, tuple[int, int]]:
    """Request id -> its draft nodes and how many of them were accepted; requests without a draft are left out."""
    trees = record.trees
    if not trees.num_nodes:
        return {}
    rows = zip(trees.request_ids, trees.sizes.tolist(), record.result.num_accepted.tolist(), strict=True)
    return {request_id: (nodes, accepted) for request_id, nodes, accepted in rows if nodes}
