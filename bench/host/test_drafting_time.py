"""Host time of drafting without its drafters: two drafters' trees are merged, carried, and reported on.

Run: `pytest bench/host --benchmark-only --benchmark-timer=time.process_time`; divide by the batch for the cost per
request.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from bench.host.trees import BLOCK, Ready, bushy, views
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.guard import Guard
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import RequestBatch, StepTiming
from vllm_specrollout.worker.drafting import Drafting, drafted_tokens, scheduled_trees

NODES = 24
BATCHES = [1, 4, 16, 64, 256]


def _parts(batch: int) -> SimpleNamespace:
    """A step's calls, each ready to be repeated."""
    rng = np.random.default_rng(0)
    drafters = [Ready([bushy(rng, NODES, source, tokens=NODES) for _ in range(batch)]) for source in range(2)]
    drafting = Drafting(Speculator(drafters, FixedBudget(NODES, NODES), guard=Guard(is_strict=True)))
    seen = views(rng.integers(40, 700, batch))
    requests = RequestBatch.of(seen)
    trees = drafting.plan(lambda: requests, 1)
    scheduled = dict(zip(*drafted_tokens(trees), strict=True))
    accepted = np.full(batch, 2, dtype=np.int32)
    nodes = np.tile(np.arange(2, dtype=np.int32), batch)
    timing = StepTiming(batch, batch * (NODES + 1), batch * NODES, 4, batch, 20.0, True)

    def observe() -> None:
        drafting.observe(drafting.planned, trees, accepted, nodes)
        drafting.timed(timing)

    return SimpleNamespace(
        plan=lambda: drafting.plan(lambda: RequestBatch.of(seen), 1),
        scheduled=lambda: scheduled_trees(trees, requests.request_ids, scheduled),
        observe=observe,
    )


@pytest.mark.parametrize("part", ["plan", "scheduled", "observe"])
@pytest.mark.parametrize("batch", BATCHES)
def test_time_of_each_part_of_drafting(benchmark: Any, batch: int, part: str) -> None:
    benchmark.extra_info["batch"] = batch
    benchmark.extra_info["block"] = BLOCK
    benchmark(getattr(_parts(batch), part))
