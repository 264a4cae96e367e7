"""What both model runners count, and how a step's verdicts become feedback."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_specrollout.types import DraftTree, Feedback, IntArray


@dataclass(slots=True)
class Stats:
    """Totals since the last reset; milliseconds are wall clock in the worker."""

    steps: int = 0
    steps_with_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    output_tokens: int = 0
    request_steps: int = 0
    forward_ms: float = 0.0
    step_ms: float = 0.0
    draft_ms: float = 0.0
    layout_ms: float = 0.0
    # V2 runner: waiting for the sampled tokens that a host drafter needs
    wait_ms: float = 0.0
    # V1 runner: accepted paths other than their trees' first; V2 runner: steps whose slots may have moved
    branches_committed: int = 0
    # rows of the forward pass -> [steps, milliseconds], decode steps only
    by_rows: dict[int, list[float]] = field(default_factory=dict)


def feedback_of(verified: Iterable[tuple[str, DraftTree, IntArray]], batch: int) -> list[Feedback]:
    """Feedback for (request id, verified tree, indices of its accepted nodes); empty trees say nothing."""
    return [
        Feedback(
            request_id,
            tree.size,
            len(accepted),
            tree.parents,
            tree.source,
            tree.log_q,
            accepted,
            batch,
        )
        for request_id, tree, accepted in verified
        if tree.size
    ]
