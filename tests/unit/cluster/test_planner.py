"""Plans by rehearsal: who is ranked, where they agree with formulas of windows, and where trees yield less or more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_specrollout.cluster.planner import Plan, Workload, choose_ladder, largest_window, plan_devices, plan_engine
from vllm_specrollout.cluster.profiles import DrafterProfile
from vllm_specrollout.cluster.rates import AffineTime, Mode, coupled_rate, decoupled_rate, plain_rate, printed_rate
from vllm_specrollout.cluster.rehearsal import Match
from vllm_specrollout.errors import ConfigError

DRAFT = AffineTime(0.002, 1.0)
VERIFY = {1: AffineTime(0.2, 40.0, 0.1), 2: AffineTime(0.1, 22.0, 0.06)}


def match(*among: float) -> Match:
    return Match.of_shares(among, np.random.default_rng(7))


def workload(*among: float, **changes) -> Workload:
    given = {"draft": DRAFT, "verify": VERIFY, "max_window": 4, "fan_out": max(len(among), 1)}
    return Workload(match=match(*(among or (0.8,))), **{**given, **changes})


def by_mode(plans: tuple[Plan, ...]) -> dict[Mode, Plan]:
    """The best of each mode."""
    return {plan.mode: plan for plan in reversed(plans)}


def one_verifier(draft: AffineTime, verify: AffineTime, *among: float, batch: int = 1, **changes) -> dict[Mode, Plan]:
    work = workload(*among, draft=draft, verify={1: verify}, **changes)
    return by_mode(plan_devices(work, 2, batch, one_host=True))


def test_every_mode_and_group_is_ranked_once_and_the_fastest_first() -> None:
    plans = plan_devices(workload(), 64, 256)
    speeds = [plan.tokens_per_s for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    groups = {(plan.mode, plan.draft_gpus, plan.verify_gpus) for plan in plans}
    assert len(groups) == len(plans) == 2 + 2 + (1 + 2), "no more drafters than verifiers"
    assert all((plan.window == 0) == (plan.mode is Mode.PLAIN) for plan in plans)
    assert all((plan.draft_gpus == 0) != (plan.mode is Mode.DECOUPLED) for plan in plans)
    assert max(plan.window for plan in plans) <= 4


def test_a_group_has_its_share_of_the_requests() -> None:
    for plan in plan_devices(workload(), 64, 256):
        assert plan.batch == math.ceil((plan.draft_gpus + plan.verify_gpus) * 256 / 64)
        assert plan.total_tokens_per_s == pytest.approx(256 * plan.tokens_per_s)


def test_groups_larger_than_the_cluster_are_left_out() -> None:
    assert {plan.draft_gpus + plan.verify_gpus for plan in plan_devices(workload(), 2, 8)} == {1, 2}
    with pytest.raises(ConfigError, match="2 devices, and the smallest verifier needs 4"):
        plan_devices(workload(verify={4: VERIFY[1]}), 2, 1)


def test_a_hosts_groups_are_whole_and_any_number_of_devices_drafts() -> None:
    plans = plan_devices(workload(verify={2: AffineTime(0.1, 10.0)}), 5, 12, one_host=True)
    batches = {(plan.draft_gpus, plan.verify_gpus): plan.batch for plan in plans}
    assert batches == {(0, 2): 6, (1, 2): 12, (2, 2): 12, (3, 2): 12}


def test_a_plan_repeats_itself() -> None:
    assert plan_devices(workload(0.8, 0.9), 4, 8) == plan_devices(workload(0.8, 0.9), 4, 8)


def test_the_largest_window_is_the_papers() -> None:
    """max(ceil(V' / D'), ceil(beta / alpha)) where rows cost nothing."""
    draft, verify = AffineTime(0.3, 1.5), AffineTime(1.0, 10.0)
    assert largest_window(draft, verify, 64) == max(math.ceil(1.0 / 0.3), math.ceil(10.0 / 1.5))
    assert largest_window(AffineTime(0.1, 1.5), verify, 64) == math.ceil(1.0 / 0.1)
    assert largest_window(AffineTime(0.0, 1.5), verify, 64) == 64


@pytest.mark.parametrize(("p", "batch"), [(0.5, 1), (0.8, 4), (0.8, 64)])
def test_formulas_agree_where_the_drafter_is_fast_and_there_are_no_exits(p: float, batch: int) -> None:
    draft, verify = AffineTime(0.0, 0.1), AffineTime(0.1, 20.0, 0.05)
    found = one_verifier(draft, verify, p, batch=batch)
    plain = found[Mode.PLAIN]
    assert plain.tokens_per_s == pytest.approx(1e3 * plain_rate(verify, plain.batch))
    for mode, rate in ((Mode.COUPLED, coupled_rate), (Mode.DECOUPLED, decoupled_rate)):
        plan = found[mode]
        # a tree's step may look one level further than a window's
        assert plan.tokens_per_s == pytest.approx(1e3 * rate(draft, verify, plan.batch, plan.window, p), rel=0.1), mode


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        # a window takes just as long as a step: by formula it is always there in time
        (AffineTime(0.0, 12.5), 0.97),
        # its branches take time, which the formulas leave out
        (AffineTime(0.0, 12.5, 2.0), 0.93),
    ],
)
def test_less_is_rehearsed_where_a_level_per_pass_is_the_limit(draft: AffineTime, most: float) -> None:
    verify = AffineTime(0.0, 50.0)
    plan = one_verifier(draft, verify, 0.8)[Mode.DECOUPLED]
    assert plan.tokens_per_s < most * 1e3 * decoupled_rate(draft, verify, 1, 4, 0.8)


def test_exits_make_decoupling_faster() -> None:
    chain, tree = (one_verifier(DRAFT, VERIFY[1], *among)[Mode.DECOUPLED] for among in ((0.6,), (0.6, 0.85)))
    assert tree.tokens_per_s > 1.15 * chain.tokens_per_s


def test_a_drafter_whose_branches_take_time_pays_for_them() -> None:
    free, expensive = (
        one_verifier(AffineTime(0.0, 5.0, row), AffineTime(0.0, 30.0), 0.8, 0.9)[Mode.DECOUPLED] for row in (0.0, 2.0)
    )
    assert expensive.tokens_per_s < 0.9 * free.tokens_per_s


def test_the_papers_figure_stands_beside_decoupled_plans() -> None:
    """Where a window of 4 is drafted in the time of its verification, it promises a quarter too much."""
    draft, verify = AffineTime(0.0, 2.5), AffineTime(0.0, 10.0)
    found = one_verifier(draft, verify, 0.8)
    plan = found[Mode.DECOUPLED]
    printed = 1e3 * printed_rate(draft, verify, 1, plan.window, match(0.8).among(1))
    assert plan.printed_per_s == pytest.approx(printed)
    assert found[Mode.PLAIN].printed_per_s is None and found[Mode.COUPLED].printed_per_s is None


@pytest.mark.parametrize(
    ("draft", "match_rate", "mode"),
    [
        (AffineTime(0.0, 20.0), 0.9, Mode.PLAIN),  # slower than the verifier
        (AffineTime(0.0, 1.0), 0.0, Mode.PLAIN),
        (AffineTime(0.0, 0.01), 0.8, Mode.COUPLED),  # as good as free: nothing to hide
        (AffineTime(0.0, 2.0), 0.9, Mode.DECOUPLED),
    ],
)
def test_two_devices_are_used_as_suits_the_drafter(draft: AffineTime, match_rate: float, mode: Mode) -> None:
    work = workload(match_rate, draft=draft, verify={1: AffineTime(0.0, 10.0, 0.1)}, max_window=16)
    assert plan_devices(work, 2, 1, one_host=True)[0].mode is mode


@pytest.mark.parametrize(("share", "gains"), [(0.5, (1.07, 1.12)), (0.8, (1.0, 1.07))])
def test_decoupling_pays_as_the_page_says(share: float, gains: tuple[float, ...]) -> None:
    """docs/concepts/planning.md; two devices and one request, so the modes have the same verifier."""
    found = []
    for match_rate in (0.5, 0.8):
        draft, verify = AffineTime(0.0, 10.0 * share), AffineTime(0.0, 10.0, 0.03)
        plans = one_verifier(draft, verify, match_rate, max_window=24)
        speeds = {mode: plan.tokens_per_s for mode, plan in plans.items()}
        found.append(speeds[Mode.DECOUPLED] / max(speeds[Mode.COUPLED], speeds[Mode.PLAIN]))
    # of 1,500 steps: another draw of the ranks gives another two in a hundred
    assert found == pytest.approx(gains, abs=0.03)


def test_a_large_batch_does_not_give_a_device_away() -> None:
    work = workload(0.9, draft=AffineTime(0.01, 2.0), verify={1: AffineTime(0.3, 10.0, 0.3)}, max_window=8)
    assert plan_devices(work, 2, 1, one_host=True)[0].mode is Mode.DECOUPLED
    assert plan_devices(work, 2, 256, one_host=True)[0].mode is not Mode.DECOUPLED


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"max_window": 0}, "`max_window` is 0, outside 1 to 64"),
        ({"fan_out": 9}, "`fan_out` is 9, outside 1 to 8"),
        ({"verify": {1: AffineTime(0.0, 0.0)}}, "a verifier on 1 devices takes 0.0 ms a step"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(**changes)
    assert caught.value.cause == cause


@pytest.mark.parametrize(("gpus", "batch", "cause"), [(0, 1, "`devices` is 0"), (1, 0, "`batch` is 0")])
def test_no_devices_or_no_requests_are_refused(gpus: int, batch: int, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        plan_devices(workload(), gpus, batch)


def known(**changes: Any) -> DrafterProfile:
    given: dict[str, Any] = {
        "draft": AffineTime(0.0, 2.0),
        "verify": {1: AffineTime(0.3, 13.0, 0.05)},
        "among": (0.8, 0.9),
    }
    return DrafterProfile(**{**given, "drafter": "small", **changes})


def test_an_engine_is_planned_with_one_drafter_beside_its_ranks() -> None:
    ahead, best = plan_engine(known(verify={4: AffineTime(0.3, 13.0, 0.05)}), 2)
    assert (ahead.mode, ahead.draft_gpus, ahead.verify_gpus) == (Mode.DECOUPLED, 1, 4)
    assert best.tokens_per_s >= ahead.tokens_per_s and ahead.gain > 1.0
    assert ahead.gain == pytest.approx(ahead.tokens_per_s / 1e3 * AffineTime(0.3, 13.0).ms(2))


def test_the_draft_ladder_has_what_gains_for_a_request_alone_the_best_first() -> None:
    fast, fair, slow = (
        known(drafter="fast"),
        known(drafter="fair", among=(0.6,)),
        known(drafter="slow", draft=AffineTime(0.0, 40.0)),
    )
    assert choose_ladder([slow, fair, fast]) == ("attach", ("fast", "fair"))
    assert choose_ladder([slow]) == choose_ladder([]) == ("move", ())
