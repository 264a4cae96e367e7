"""Host time of drafting without its drafters and its policy: two drafters' trees are united, carried, and reported on.

Run: `pytest bench/host --benchmark-only --benchmark-timer=time.process_time`; divide by the batch for the cost per
request. `naive` unites with `trees.build.union`, as the specification does; `core` with the C++ core.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_specrollout.guard import Guard
from vllm_specrollout.step import Speculation, unite_naively
from vllm_specrollout.trees.build import order
from vllm_specrollout.types import Choice, Decision, DraftTree, Ending, Feedback, RequestView, Shape, StepTiming
from vllm_specrollout.worker.unite import unite
from vllm_specrollout.worker.v1.drafting import Drafting

NODES, BLOCK = 24, 32
BATCHES = [1, 4, 16, 64]


class Ready:
    """A drafter whose trees are ready."""

    def __init__(self, name: str, trees: list[DraftTree]) -> None:
        self.name, self.trees = name, trees

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return self.trees

    def observe(self, feedback: Sequence[Feedback]) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def forget(self, request_id: str) -> None: ...


class TakesAll:
    """A policy that costs nothing: verifies whatever is proposed."""

    def __init__(self, batch: int) -> None:
        self.decisions = [Decision(NODES, NODES, Shape.TREE)] * batch

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        return self.decisions

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        return trees

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def explain(self) -> Choice | None: ...


def _tree(rng: np.random.Generator, source: int) -> DraftTree:
    """A bushy tree that shares about half of its nodes with another one: tokens are drawn from few."""
    parents = [-1, *(int(rng.integers(max(-1, i // 2 - 1), i)) for i in range(1, NODES))]
    return order(
        DraftTree(
            rng.permutation(NODES).astype(np.int32),
            np.asarray(parents, np.int32),
            np.log(rng.uniform(0.2, 0.9, NODES)).astype(np.float32),
            np.full(NODES, source, np.int32),
        )
    )


def _parts(batch: int, unite_with: Any) -> SimpleNamespace:
    """A step's calls, each ready to be repeated."""
    rng = np.random.default_rng(0)
    drafters = [Ready(str(source), [_tree(rng, source) for _ in range(batch)]) for source in range(2)]
    speculation = Speculation(drafters, TakesAll(batch), unite_with, guard=Guard(is_strict=True))
    drafting = Drafting(speculation, batch * NODES * NODES, BLOCK)
    ids = [str(i) for i in range(batch)]
    views = [RequestView(i, np.zeros(int(rng.integers(40, 700)), np.int32), 8, 500) for i in ids]
    tokens, _ = drafting.prepare(lambda: views, 1)
    scheduled = dict(zip(tokens.req_ids, tokens.draft_token_ids, strict=True))
    drafts = drafting.scheduled(ids, scheduled)
    accepted = np.full(batch, 2, dtype=np.int32)
    nodes = np.tile(np.arange(2, dtype=np.int32), batch)
    timing = StepTiming(batch, batch * (NODES + 1), batch * NODES, 4, batch, 20.0, True)
    return SimpleNamespace(
        unite=lambda: speculation.prepare(views),
        prepare=lambda: drafting.prepare(lambda: views, 1),
        scheduled=lambda: drafting.scheduled(ids, scheduled),
        settle=lambda: drafting.settle(ids, drafts, accepted, nodes, timing),
    )


@pytest.mark.parametrize("unite_with", [unite_naively, unite], ids=["naive", "core"])
@pytest.mark.parametrize("batch", BATCHES)
def test_time_of_uniting_two_24_node_trees_per_request(benchmark: Any, batch: int, unite_with: Any) -> None:
    benchmark.extra_info["batch"] = batch
    benchmark(_parts(batch, unite_with).unite)


@pytest.mark.parametrize("part", ["prepare", "scheduled", "settle"])
@pytest.mark.parametrize("batch", BATCHES)
def test_time_of_each_part_of_drafting(benchmark: Any, batch: int, part: str) -> None:
    benchmark.extra_info["batch"] = batch
    benchmark(getattr(_parts(batch, unite), part))
