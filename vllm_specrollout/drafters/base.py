"""The one Protocol of all drafters. A drafter proposes; it never touches the engine's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_specrollout.types import Decision, DraftTree, Ending, Feedback, RequestView


class Drafter(Protocol):
    """Proposes draft trees for a batch of running requests."""

    name: str

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        """One tree per view, in order; an empty tree where there is nothing to draft.

        A tree has at most `decision.max_nodes` nodes and `decision.max_depth` levels, is a chain where the decision
        says so, and is sorted so that every prefix is the best tree of its size (`trees.build.order` does that).
        """
        ...

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Learn what became of the last step's drafts."""
        ...

    def finish(self, ending: Ending) -> None:
        """The request is over (finished, cut off, aborted); also called for requests it was never asked about."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for the request: it is over, or preempted and comes back; unknown ids are ignored."""
        ...
