"""The two budgets that need no thought: always as much as is allowed, and never anything."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.budgets.base import FOR_GOOD, BaseBudget
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, TreeBatch, empty_trees


class FixedBudget(BaseBudget):
    """Always verifies up to the configured size; for benchmarks, for recordings, and for those who know better."""

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        merged = merge_select(proposals, limits)
        return StepPlan(merged.trees, "fixed", pays=bool(merged.trees.num_nodes))


class OffBudget(BaseBudget):
    """Never drafts: plain decoding through the same engine, for comparison."""

    def __init__(self, max_nodes: int = 0, max_depth: int = 0) -> None:
        super().__init__(0, 0)

    def steps_off(self, num_requests: int) -> int:
        return FOR_GOOD

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        return StepPlan(empty_trees(batch.request_ids), "off", is_on=False, pays=False)
