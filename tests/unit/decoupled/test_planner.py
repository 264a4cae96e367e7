from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.decoupled_plan import best_decoupled
from vllm_specrollout.decoupled.planner import Workload, choose_placement, largest_window, plan_cluster
from vllm_specrollout.decoupled.rates import Exits, Mode, plain_rate
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError

DRAFT = AffineTime(0.002, 1.0)
VERIFY = {1: AffineTime(0.2, 40.0, 0.1), 2: AffineTime(0.1, 22.0, 0.06), 4: AffineTime(0.04, 13.0, 0.03)}


def workload(match_rate: float = 0.8, **changes) -> Workload:
    return Workload(**{"draft": DRAFT, "verify": VERIFY, "match_rate": match_rate, **changes})


drafts = st.builds(AffineTime, st.floats(0.005, 0.1), st.floats(0.5, 4.0))
verifiers = st.dictionaries(
    st.sampled_from([1, 2, 4]),
    st.builds(AffineTime, st.floats(0.0, 0.2), st.floats(4.0, 20.0), st.floats(0.0, 0.002)),
    min_size=1,
)


@settings(max_examples=30)
@given(
    draft=drafts,
    verify=verifiers,
    match_rate=st.floats(0.05, 0.95),
    gpus=st.integers(2, 64),
    batch=st.integers(1, 4096),
    tau=st.sampled_from(["paper", "waiting"]),
)
def test_pruning_loses_nothing(
    draft: AffineTime, verify: dict, match_rate: float, gpus: int, batch: int, tau: str
) -> None:
    """Against all windows up to the limit, which pruning does not know of."""
    work = workload(match_rate, draft=draft, verify=verify, tau=tau)
    best = best_decoupled(work, gpus, batch, windows=64)
    if min(verify) > gpus:
        return
    ranking = plan_cluster(work, gpus, batch)
    found = [plan.tokens_per_s for plan in (ranking.best, *ranking.others) if plan.mode is Mode.DECOUPLED]
    assert max(found, default=0.0) == pytest.approx(best, rel=1e-9)


@settings(max_examples=20)
@given(draft=drafts, verify=verifiers, match_rate=st.floats(0.05, 0.95), batch=st.integers(1, 64))
def test_pruning_loses_little_if_the_verifier_never_waits(
    draft: AffineTime, verify: dict, match_rate: float, batch: int
) -> None:
    work = workload(match_rate, draft=draft, verify=verify)
    best = best_decoupled(work, 16, batch, windows=32)
    ranking = plan_cluster(work, 16, batch)
    found = [plan.tokens_per_s for plan in (ranking.best, *ranking.others) if plan.mode is Mode.DECOUPLED]
    assert max(found) >= 0.99 * best


def test_a_group_has_its_share_of_the_requests() -> None:
    ranking = plan_cluster(workload(), 256, 8192)
    for plan in (ranking.best, *ranking.others):
        assert plan.batch == math.ceil((plan.draft_gpus + plan.verify_gpus) * 8192 / 256)
        assert plan.total_tokens_per_s == pytest.approx(8192 * plan.tokens_per_s)


def test_every_mode_and_group_is_ranked_once_and_the_fastest_first() -> None:
    ranking = plan_cluster(workload(), 256, 8192)
    plans = [ranking.best, *ranking.others]
    speeds = [plan.tokens_per_s for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    groups = {(plan.mode, plan.draft_gpus, plan.verify_gpus) for plan in plans}
    assert len(groups) == len(plans) == 3 + 3 + (1 + 2 + 4)
    assert all((plan.window == 0) == (plan.mode is Mode.PLAIN) for plan in plans)
    assert all((plan.draft_gpus == 0) != (plan.mode is Mode.DECOUPLED) for plan in plans)


def test_drafters_are_at_most_as_many_as_verifiers() -> None:
    ranking = plan_cluster(workload(), 256, 64)
    assert all(plan.draft_gpus <= plan.verify_gpus for plan in (ranking.best, *ranking.others))


def test_groups_larger_than_the_cluster_are_left_out() -> None:
    ranking = plan_cluster(workload(), 3, 8)
    assert all(plan.draft_gpus + plan.verify_gpus <= 3 for plan in (ranking.best, *ranking.others))


def test_the_largest_window_is_the_papers() -> None:
    """max(ceil(V' / D'), ceil(beta / alpha)) where rows cost nothing."""
    draft, verify = AffineTime(0.3, 1.5), AffineTime(1.0, 10.0)
    assert largest_window(draft, verify, 64) == max(math.ceil(1.0 / 0.3), math.ceil(10.0 / 1.5))
    assert largest_window(AffineTime(0.1, 1.5), verify, 64) == math.ceil(1.0 / 0.1)
    assert largest_window(AffineTime(0.0, 1.5), verify, 64) == 64


def test_where_times_are_balanced_the_paper_promises_too_much() -> None:
    """A window of 4 is drafted in the time of its verification, at p = 0.8: 24 % too much."""

    def speed(tau: str) -> float:
        work = workload(draft=AffineTime(0.0, 2.5), verify={1: AffineTime(0.0, 10.0)}, tau=tau)
        ranking = plan_cluster(work, 2, 1)
        return next(p.tokens_per_s for p in (ranking.best, *ranking.others) if p.mode is Mode.DECOUPLED)

    assert speed("paper") / speed("waiting") == pytest.approx(1.24, abs=0.005)


@pytest.mark.parametrize(
    ("draft", "match_rate", "mode"),
    [
        (AffineTime(0.0, 20.0), 0.9, Mode.PLAIN),  # slower than the verifier
        (AffineTime(0.0, 1.0), 0.0, Mode.PLAIN),
        (AffineTime(0.0, 0.01), 0.8, Mode.COUPLED),  # as good as free: nothing to hide
        (AffineTime(0.0, 2.5), 0.9, Mode.DECOUPLED),
    ],
)
def test_two_devices_are_used_as_suits_the_drafter(draft: AffineTime, match_rate: float, mode: Mode) -> None:
    work = workload(match_rate, draft=draft, verify={1: AffineTime(0.0, 10.0, 0.1)})
    assert choose_placement(work, 2, 1).best.mode is mode


@pytest.mark.parametrize(
    ("share", "gains"),
    [(0.05, (0.82, 0.83, 0.89, 1.05)), (0.2, (1.05, 1.14, 1.22, 1.32)), (0.8, (1.02, 1.06, 1.11, 1.11))],
)
def test_decoupling_pays_as_the_page_says(share: float, gains: tuple[float, ...]) -> None:
    """docs/concepts/decoupled.md; two devices and one request, so the modes have the same verifier."""
    found = []
    for match_rate in (0.5, 0.7, 0.8, 0.9):
        work = workload(match_rate, draft=AffineTime(0.0, 10.0 * share), verify={1: AffineTime(0.0, 10.0, 0.03)})
        ranking = choose_placement(work, 2, 1)
        speeds = {plan.mode: plan.tokens_per_s for plan in (ranking.best, *ranking.others)}
        found.append(speeds[Mode.DECOUPLED] / max(speeds[Mode.COUPLED], speeds[Mode.PLAIN]))
    assert found == pytest.approx(gains, abs=0.006)


def test_a_large_batch_does_not_give_a_device_away() -> None:
    work = workload(0.8, draft=AffineTime(0.01, 2.0), verify={1: AffineTime(0.3, 10.0, 0.3)})
    assert choose_placement(work, 2, 1).best.mode is Mode.DECOUPLED
    assert choose_placement(work, 2, 256).best.mode is not Mode.DECOUPLED


def test_a_hosts_groups_are_whole() -> None:
    verify = {2: AffineTime(0.1, 10.0)}
    ranking = choose_placement(workload(verify=verify), 5, 12)
    batches = {(p.draft_gpus, p.verify_gpus): p.batch for p in (ranking.best, *ranking.others)}
    assert batches == {(0, 2): 6, (1, 2): 12, (2, 2): 12, (3, 2): 12}


def test_plain_tokens_per_second_are_those_of_a_step() -> None:
    ranking = choose_placement(workload(0.0), 4, 8)
    assert ranking.best.mode is Mode.PLAIN
    assert ranking.best.tokens_per_s == pytest.approx(
        1e3 * max(plain_rate(time, math.ceil(8 / (4 // size))) for size, time in VERIFY.items())
    )


def test_exits_make_decoupling_faster() -> None:
    def speed(exits: Exits) -> float:
        ranking = choose_placement(workload(0.6, exits=exits), 5, 1)
        return max(p.tokens_per_s for p in (ranking.best, *ranking.others) if p.mode is Mode.DECOUPLED)

    assert speed(Exits(0.6, 2)) > 1.2 * speed(Exits())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"match_rate": 1.5}, "`match_rate` is 1.5, outside 0 to 1"),
        ({"tau": "guess"}, "`tau` is 'guess', which does not exist"),
        ({"tau": "paper", "exits": Exits(0.5, 1)}, "exits are given, and `tau` is 'paper'"),
        ({"max_window": 0}, "`max_window` is 0"),
        ({"verify": {}}, "no verifier is given"),
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
        plan_cluster(workload(), gpus, batch)


def test_a_verifier_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 devices, and the smallest verifier needs 4"):
        choose_placement(workload(verify={4: VERIFY[4]}), 2, 1)
