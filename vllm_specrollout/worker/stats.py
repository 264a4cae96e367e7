"""What both model runners count."""

from __future__ import annotations

from dataclasses import dataclass, field


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
