"""Batches, steps and costs as the engine would hand them over; shared by the tests of the published budgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.trees import batch_of, chain, tree_of
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.types import (
    EMPTY_TREE,
    DraftTree,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    StepTiming,
    VerifyResult,
    empty_trees,
)


class Line(StepCost):
    """A cost model that knows: fixed + row * rows milliseconds, and something for branches."""

    def __init__(self, fixed: float = 10.0, row: float = 0.2, branch: float = 0.0) -> None:
        super().__init__()
        self._fixed, self._row, self._branch = fixed, row, branch

    def plain_ms(self, num_requests: int) -> float:
        return self._fixed + self._row * num_requests

    def added_ms(self, num_requests: int, num_nodes: int) -> np.ndarray:
        return self._row * np.arange(num_nodes + 1)

    @property
    def branch_ms(self) -> float:
        return self._branch

    def predict(self, num_requests: int, num_nodes: int, branches: int = 0) -> float:
        drafts = self._row * num_nodes + self._branch * branches
        return self.plain_ms(num_requests) + drafts


def view(name: str = "r", *, generated: int = 2, **kwargs: object) -> RequestView:
    """A request with a prompt of two tokens."""
    return RequestView(**{"request_id": name, "token_ids": np.zeros(2 + generated, np.int32), "num_prompt_tokens": 2,
                          "max_new_tokens": 1000, **kwargs})  # fmt: skip


def requests(count: int, **kwargs: object) -> RequestBatch:
    return RequestBatch.of([view(f"r{i}", **kwargs) for i in range(count)])


def star_of_chains(width: int, depth: int) -> DraftTree:
    """`width` chains that all start at the root, the first ones likelier; level by level, as drafters give them."""
    nodes = [(level, i) for level in range(depth) for i in range(width)]
    first = [0.8 / (i + 1) for i in range(width)]
    return tree_of(
        [(level - 1) * width + i if level else -1 for level, i in nodes],
        [100 * i + level for level, i in nodes],
        [0.8 if level else first[i] / max(sum(first), 1.0) for level, i in nodes],
    )


def chains_of(batch: RequestBatch, size: int) -> list:
    """What one drafter proposes: the same chain for everybody."""
    return [batch_of([chain(list(range(size)), probability=0.8)] * batch.size, batch.request_ids)]


def step(
    sizes: Sequence[int],
    accepted: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    plan: StepPlan | None = None,
    timing: StepTiming | None = None,
) -> StepRecord:
    """A step in which each request had a chain of so many tokens, of which so many were accepted."""
    ids = [f"r{i}" for i in range(len(sizes))] if names is None else names
    trees = batch_of([chain(list(range(n))) if n else EMPTY_TREE for n in sizes], ids) if sizes else empty_trees([])
    taken = [np.arange(a, dtype=np.int32) for a in accepted]
    result = VerifyResult(np.asarray(accepted, np.int32), np.concatenate([np.zeros(0, np.int32), *taken]))
    return StepRecord(plan, trees, result, timing)


def planned(budget: Budget, batch: RequestBatch, tree: DraftTree) -> StepPlan:
    """One step as the speculator asks for it, with one drafter that proposes the same tree for everybody."""
    limits = budget.limits(batch)
    return budget.choose([batch_of([tree] * batch.size, batch.request_ids)], limits, batch, 0.0)
