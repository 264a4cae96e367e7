"""Host time of a tree beyond the model: everything between the scheduler's drafts and the committed blocks but torch's
attention and sampling kernels. Run: `pytest bench/host --benchmark-only`; divide by the batch for the cost per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.trees import batch_of, tree_of
from vllm_specrollout import _core
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.trees.build import order
from vllm_specrollout.trees.kv_moves import plan_moves
from vllm_specrollout.trees.tape import SeedTape
from vllm_specrollout.types import DraftLimits, DraftTree, RequestBatch, RequestView, StepTiming, TreeBatch
from vllm_specrollout.worker.drafting import Drafting, drafted_tokens, scheduled_trees
from vllm_specrollout.worker.v1.attention import plan_paths
from vllm_specrollout.worker.v1.sampler import node_seeds, row_layout

NODES = 32
BLOCK = 32


def bushy(rng: np.random.Generator) -> DraftTree:
    """A tree with two children for the likely nodes."""
    parents = [-1, *(int(rng.integers(max(-1, i // 2 - 1), i)) for i in range(1, NODES))]
    return order(tree_of(parents, rng.permutation(NODES).tolist(), rng.uniform(0.2, 0.9, NODES).tolist()))


class Ready(BaseDrafter):
    """A drafter whose trees are ready, so that only their way is timed."""

    name = "ready"

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self.trees = batch_of(trees)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        return self.trees


def _step(batch: int, budget: Budget) -> Any:
    rng = np.random.default_rng(0)
    drafting = Drafting(Speculator([Ready([bushy(rng)] * batch)], budget, guard=Guard(is_strict=True)))
    base = rng.integers(40, 700, batch).astype(np.int32)
    seen = [RequestView(str(i), np.zeros(n + 1, np.int32), 8, 500) for i, n in enumerate(base.tolist())]
    ids = [view.request_id for view in seen]
    table = np.arange(batch * 40, dtype=np.int32).reshape(batch, 40) + 1
    scratch = np.arange(table.max() + 1, table.max() + 1 + 64 * batch, dtype=np.int32)
    entries = [SimpleNamespace(tape=SeedTape(lambda n: np.zeros(n, np.int64))) for _ in ids]
    sampled = np.full(batch * (NODES + 1), -7, dtype=np.int64)
    roots = np.arange(batch + 1, dtype=np.int32)
    timing = StepTiming(batch, batch * (NODES + 1), batch * NODES, 4, batch, 20.0, True)

    def run() -> None:
        planned = drafting.plan(lambda: RequestBatch.of(seen), 1)
        trees = scheduled_trees(planned, ids, dict(zip(*drafted_tokens(planned), strict=True)))
        plan, _ = plan_paths(trees.node_start + roots, base, trees.node_start, trees.parents, table, BLOCK, scratch, 0)
        _, row_depth = row_layout(trees)
        node_seeds(entries, trees.node_start, row_depth)
        _, _, num_accepted, _ = _core.walk(
            trees.node_start, trees.parents, trees.token_ids, sampled[: trees.num_nodes + batch]
        )
        plan_moves(num_accepted, plan.first_path, plan.first_path, plan.root, plan.tables, table, BLOCK)
        # told that all was accepted: a budget that learns would otherwise soon draft nothing, and cost nothing
        everything = np.arange(trees.num_nodes, dtype=np.int32) - np.repeat(trees.node_start[:-1], trees.sizes)
        drafting.observe(drafting.planned, trees, trees.sizes.astype(np.int32), everything.astype(np.int32))
        drafting.timed(timing)

    return run


@pytest.mark.parametrize("budget", ["fixed", "auto"])
@pytest.mark.parametrize("batch", [1, 4, 16, 64, 256])
def test_host_time_of_32_node_trees(benchmark: Any, batch: int, budget: str) -> None:
    made = FixedBudget(NODES, NODES) if budget == "fixed" else GoodputBudget(NODES, NODES)
    benchmark.extra_info["batch"] = batch
    benchmark(_step(batch, made))
