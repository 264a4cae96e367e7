"""Count of how often drafting was switched off and on, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, TreeBatch


class SwitchCounter(Listener):
    """Counts steps by whether they drafted.

    A step is off when nothing is verified although something was proposed, or when no drafter was asked. Steps for
    which drafters knew nothing count for nothing.
    """

    def __init__(self) -> None:
        self._counts = {"steps_on": 0, "steps_off": 0, "switches": 0, "mind_changes": 0}
        self._was_drafting: bool | None = None
        self._was_on: bool | None = None

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        if any(proposal.num_nodes for proposal in proposals):
            self._count(plan.is_on, plan.trees.num_nodes)

    def paused(self, num_requests: int, reason: str) -> None:
        self._count(False, 0)

    def start_over(self) -> dict[str, int]:
        """The counts since the last call, which begin anew.

        `steps_on`, `steps_off`; `switches`: changes between such steps; `mind_changes`: changes of the plans' `is_on`.
        """
        counts = self._counts
        self._counts = dict.fromkeys(counts, 0)
        self._was_drafting = self._was_on = None
        return counts

    def _count(self, is_on: bool, nodes: int) -> None:
        is_drafting = is_on and nodes > 0
        self._counts["steps_on" if is_drafting else "steps_off"] += 1
        self._counts["switches"] += self._was_drafting not in (None, is_drafting)
        self._counts["mind_changes"] += self._was_on not in (None, is_on)
        self._was_drafting, self._was_on = is_drafting, is_on
