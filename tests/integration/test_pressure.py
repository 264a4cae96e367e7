"""Drafts preempt nobody, in vLLM's schedulers: small KV caches, drafts good and bad, in lockstep and ahead."""

from __future__ import annotations

from functools import cache

import pytest

from tests.e2e.identity.engines import model
from tests.e2e.pressure import requests as cases
from tests.e2e.schedulers import SCHEDULERS, Bench, run

PLACES = 32
SIZES = (24, 30, 48)
SEEDS = range(6)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(model(tmp_path_factory.mktemp("models"), "qwen3", "bfloat16"), PLACES)


@pytest.fixture(scope="module")
def stock(bench: Bench):
    """Preemptions of stock vLLM."""

    @cache
    def count(kind: str, blocks: int) -> int:
        return sum(run(bench.scheduler(kind, blocks), kind, cases(PLACES, 20, 160, seed)).preempted for seed in SEEDS)

    return count


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_drafts_preempt_nobody_that_stock_would_have_kept(
    bench: Bench, stock, kind: str, blocks: int, acceptance: float
) -> None:
    plain = stock("stock ahead" if kind.endswith("ahead") else "stock", blocks)
    assert plain >= 40, "the pressure is too low for a ratio to mean anything"
    runs = [run(bench.scheduler(kind, blocks), kind, cases(PLACES, 20, 160, seed), acceptance) for seed in SEEDS]
    assert sum(one.preempted for one in runs) <= 1.05 * plain
    assert all(one.accepted > 0 for one in runs) or not acceptance


def test_drafts_are_whole_where_blocks_are_plenty(bench: Bench) -> None:
    """The rule may not cost a draft where nobody wants for blocks."""
    done = {blocks: run(bench.scheduler("v1", blocks), "v1", cases(8, 100, 100, 0), 0.9) for blocks in (80, 10_000)}
    assert done[80].preempted == 0
    assert done[80].steps == done[10_000].steps


@pytest.mark.parametrize("blocks", [60, 90, 140])
def test_longest_first_preempts_no_more_than_the_order_of_arrival(bench: Bench, blocks: int) -> None:
    """The second pass knows how long all answers are."""
    ours = theirs = 0
    for seed in range(2):
        requests = cases(96, 10, 300, seed)
        plain, scheduler = bench.scheduler("stock", blocks), bench.scheduler("v1", blocks)
        for _ in range(2):
            theirs += run(plain, "stock", requests).preempted
            ours += run(scheduler, "v1", requests, 0.3).preempted
    assert ours <= 1.05 * theirs + 2
