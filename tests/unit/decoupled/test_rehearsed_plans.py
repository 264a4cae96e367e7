"""Plans by rehearsal: where they agree with the formulas, and where trees yield less."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.decoupled.planner import Plan, Workload, choose_placement
from vllm_specrollout.decoupled.rates import Exits, Mode
from vllm_specrollout.decoupled.rehearsal import Match
from vllm_specrollout.decoupled.rehearsed_plans import RehearsedPlan, Trees, rehearse_placements
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError


def match(*among: float) -> Match:
    return Match.of_shares(among, np.random.default_rng(7))


def by_mode(found: tuple[RehearsedPlan, ...]) -> dict[Mode, RehearsedPlan]:
    """The best of each mode."""
    return {one.plan.mode: one for one in reversed(found)}


@pytest.mark.parametrize(("p", "batch"), [(0.5, 1), (0.8, 4), (0.9, 1)])
def test_both_agree_where_the_drafter_is_fast_and_there_are_no_exits(p: float, batch: int) -> None:
    work = Workload(draft=AffineTime(0.0, 0.1), verify={1: AffineTime(0.1, 20.0, 0.05)}, match_rate=p, max_window=8)
    found = by_mode(rehearse_placements(work, 2, batch, Trees(match(p), fan_out=1), request_steps=1000))
    for mode in Mode:
        one = found[mode]
        # a tree's step may look one level further than a window's
        assert one.rehearsed_per_s == pytest.approx(one.plan.tokens_per_s, rel=0.1), mode


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        # a window takes just as long as a step: by formula it is always there in time
        (AffineTime(0.0, 12.5), 0.97),
        # its nodes have to be computed again in each pass, which the formulas leave out
        (AffineTime(0.0, 12.5, 2.0), 0.85),
    ],
)
def test_a_rehearsal_is_lower_where_a_level_per_pass_is_the_limit(draft: AffineTime, most: float) -> None:
    work = Workload(draft=draft, verify={1: AffineTime(0.0, 50.0)}, match_rate=0.8, max_window=4)
    found = by_mode(rehearse_placements(work, 2, 1, Trees(match(0.8), fan_out=1), request_steps=1000))[Mode.DECOUPLED]
    assert found.rehearsed_per_s < most * found.plan.tokens_per_s


def test_a_rehearsal_is_higher_where_a_window_takes_longer_than_a_step() -> None:
    """What has come of a tree is verified; a window waits until it is whole, and has no exits behind its exits."""
    work = Workload(
        draft=AffineTime(0.0, 22.0), verify={1: AffineTime(0.0, 56.0)}, match_rate=0.64, exits=Exits(0.36, 1)
    )
    found = by_mode(rehearse_placements(work, 2, 1, Trees(match(0.64, 0.77)), request_steps=600))[Mode.DECOUPLED]
    assert found.rehearsed_per_s > 1.05 * found.plan.tokens_per_s
    assert found.tokens_per_step < 56.0 / 22.0


def test_plans_are_those_of_one_host_the_fastest_in_rehearsal_first() -> None:
    work = Workload(
        draft=AffineTime(0.05, 2.0),
        verify={1: AffineTime(0.5, 20.0, 0.2), 2: AffineTime(0.3, 12.0, 0.1)},
        match_rate=0.8,
        max_window=4,
    )
    found = rehearse_placements(work, 3, 2, Trees(match(0.8, 0.9)), request_steps=300)
    ranking = choose_placement(work, 3, 2)

    def places(plan: Plan) -> tuple[Mode, int, int, int]:
        return plan.mode, plan.draft_gpus, plan.verify_gpus, plan.batch

    assert sorted(places(one.plan) for one in found) == sorted(map(places, (ranking.best, *ranking.others)))
    rates = [one.rehearsed_per_s for one in found]
    assert rates == sorted(rates, reverse=True)
    assert all((one.window == 0) == (one.plan.mode is Mode.PLAIN) for one in found)
    assert max(one.window for one in found) <= 4
    # two groups of one device share the requests
    assert all(one.plan.total_tokens_per_s == pytest.approx(2 * one.plan.tokens_per_s) for one in found)
    assert found == rehearse_placements(work, 3, 2, Trees(match(0.8, 0.9)), request_steps=300), "it repeats itself"


def test_a_drafter_that_looks_at_many_nodes_pays_for_them() -> None:
    verify = {1: AffineTime(0.0, 30.0)}
    free, dear = (
        by_mode(
            rehearse_placements(
                Workload(draft=AffineTime(0.0, 5.0, row), verify=verify, match_rate=0.8, max_window=4),
                2,
                1,
                Trees(match(0.8, 0.9)),
                request_steps=400,
            )
        )[Mode.DECOUPLED]
        for row in (0.0, 2.0)
    )
    assert dear.rehearsed_per_s < 0.9 * free.rehearsed_per_s


def test_batches_too_large_and_trees_that_make_no_sense_are_refused() -> None:
    work = Workload(draft=AffineTime(0.0, 1.0), verify={1: AffineTime(0.0, 10.0)}, match_rate=0.8)
    with pytest.raises(ConfigError, match="1000 requests, and at most 256"):
        rehearse_placements(work, 1, 1000, Trees(match(0.8)))
    for wrong in ({"fan_out": 0}, {"fan_out": 9}, {"most_nodes": 0}, {"most_nodes": 65}):
        with pytest.raises(ConfigError):
            Trees(match(0.8), **wrong)
