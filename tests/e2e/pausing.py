"""A budget for which drafts never pay, and a drafter that always has some: when are they asked again?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.drafters import TreeByTree
from tests.trees import chain
from vllm_specrollout.budgets.base import BaseBudget
from vllm_specrollout.types import (
    DraftLimits,
    DraftTree,
    RequestBatch,
    RequestView,
    StepPlan,
    TreeBatch,
    empty_trees,
)

# asked in each of the first 4 steps, then after pauses of 4, 8, 16, 32 and 64
GAPS = [1] * 3 + [5, 9, 17, 33, 65, 65]
STEPS = 1 + sum(GAPS)


class NeverPays(BaseBudget):
    """Drafts nothing, and says that asking did not pay; clocks have no say in it.

    Args:
        step: the number of the engine step in progress.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        super().__init__(4, 4)
        self.asked_at: list[int] = []
        self._step = step

    def limits(self, batch: RequestBatch) -> DraftLimits:
        self.asked_at.append(self._step())
        return super().limits(batch)

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        assert any(trees.num_nodes for trees in proposals)
        return StepPlan(empty_trees(batch.request_ids), "never", pays=False)

    @property
    def gaps(self) -> list[int]:
        """Engine steps from each time that drafters were asked to the next."""
        return [after - before for before, after in zip(self.asked_at, self.asked_at[1:], strict=False)]


class Always(TreeByTree):
    """Proposes the same chain for everybody, or nothing at all."""

    name = "always"

    def __init__(self, tokens: Sequence[int] = (7, 8)) -> None:
        self.tokens = list(tokens)

    def tree(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        return chain(self.tokens[: min(max_nodes, max_depth)])
