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

from vllm_specrollout.policies.auto import AutoBudget
from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.step import Speculation
from vllm_specrollout.worker.v1.drafting import Drafting

from vllm_specrollout import _core
from vllm_specrollout.guard import Guard
from vllm_specrollout.trees.build import order
from vllm_specrollout.trees.kv_moves import plan_moves
from vllm_specrollout.types import Decision, DraftTree, Ending, Feedback, RequestView, StepTiming
from vllm_specrollout.verify.tape import SeedTape
from vllm_specrollout.worker.v1.attention import plan_paths
from vllm_specrollout.worker.v1.requests import node_seeds
from vllm_specrollout.worker.v1.sampler import Drafts, row_layout

NODES, BLOCK = 32, 32


def _tree(rng: np.random.Generator) -> DraftTree:
    """A bushy tree: two children for the likely nodes."""
    parents = [-1, -1, *(int(rng.integers(max(0, i // 2 - 1), i)) for i in range(2, NODES))]
    return order(
        DraftTree(
            np.arange(NODES, dtype=np.int32),
            np.asarray(parents, np.int32),
            np.log(rng.uniform(0.2, 0.9, NODES)).astype(np.float32),
            np.zeros(NODES, np.int32),
        )
    )


class Ready:
    """A drafter whose trees are ready, so that only the way of the trees is timed."""

    name = "ready"

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [self.tree] * len(views)

    def observe(self, feedback: Sequence[Feedback]) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def forget(self, request_id: str) -> None: ...


def _step(batch: int, policy: Any) -> Any:
    rng = np.random.default_rng(0)
    tree = _tree(rng)
    drafting = Drafting(Speculation([Ready(tree)], policy, guard=Guard(is_strict=True)), 4096, BLOCK)
    ids = [str(i) for i in range(batch)]
    base = rng.integers(40, 700, batch).astype(np.int32)
    views = [RequestView(i, np.zeros(b + 1, np.int32), 8, 500) for i, b in zip(ids, base, strict=True)]
    table = np.arange(batch * 40, dtype=np.int32).reshape(batch, 40) + 1
    scratch = np.arange(10_000, 14_096, dtype=np.int32)
    entries = [SimpleNamespace(tape=SeedTape(lambda n: np.zeros(n, np.int64))) for _ in ids]
    sampled = np.full(batch * (NODES + 1), -7, dtype=np.int64)
    roots = np.arange(batch + 1, dtype=np.int32)
    everything = np.arange(NODES, dtype=np.int32)
    timing = StepTiming(batch, batch * (NODES + 1), batch * NODES, 4, batch, 20.0, True)

    def run() -> None:
        tokens, _ = drafting.prepare(lambda: views, 1)
        drafts = drafting.scheduled(ids, dict(zip(tokens.req_ids, tokens.draft_token_ids, strict=True)))
        plan, _ = plan_paths(
            drafts.node_start + roots, base, drafts.node_start, drafts.parents, table, BLOCK, scratch, 0
        )
        nodes = Drafts(drafts.node_start, drafts.parents, drafts.token_ids, plan.depths)
        _, row_depth = row_layout(nodes)
        node_seeds(entries, drafts.node_start, row_depth)
        _, _, num_accepted, _ = _core.walk(
            drafts.node_start, drafts.parents, drafts.token_ids, sampled[: len(drafts.parents) + batch]
        )
        plan_moves(num_accepted, plan.first_path, plan.first_path, plan.root, plan.tables, table, BLOCK)
        # told that all was accepted: a budget that learns would otherwise soon draft nothing, and cost nothing
        sizes = np.diff(drafts.node_start)
        drafting.settle(ids, drafts, sizes, np.concatenate([everything[:size] for size in sizes]), timing)

    return run


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_host_time_of_32_node_trees(benchmark: Any, batch: int, policy: str) -> None:
    budget = FixedBudget(NODES, NODES) if policy == "fixed" else AutoBudget(NODES, NODES)
    benchmark.extra_info["batch"] = batch
    benchmark(_step(batch, budget))
