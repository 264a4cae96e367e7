from __future__ import annotations

import numpy as np
import pytest

from tests.reference import decoupled_rates as naive
from vllm_specrollout.decoupled.rates import Mode, coupled_rate, printed_rate
from vllm_specrollout.decoupled.reconfigure import Group, MatchCounts, OwnPlan, Reconfigurer, reconfigure
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError

GROUP = Group(AffineTime(0.002, 1.0), AffineTime(0.05, 12.0, 0.05), 8)


def counts(*rates: float, tried: int = 400) -> MatchCounts:
    matched = np.rint(np.asarray(rates) * tried).astype(np.int32)
    return MatchCounts(tuple(f"r{i}" for i in range(len(rates))), np.full(len(rates), tried, np.int32), matched)


def test_only_requests_far_below_the_batch_get_a_plan() -> None:
    assert set(reconfigure(GROUP, counts(*[0.8] * 15, 0.3))) == {"r15"}


def test_of_equal_requests_few_get_a_plan() -> None:
    """Two standard errors: about one in 44, where half are below the average."""
    matched = np.random.default_rng(0).binomial(200, 0.7, 1000).astype(np.int32)
    equal = MatchCounts(tuple(map(str, range(1000))), np.full(1000, 200, np.int32), matched)
    assert 10 <= len(reconfigure(GROUP, equal)) <= 40


def test_few_trials_prove_nothing() -> None:
    few = MatchCounts(("a", "b"), np.asarray([1000, 2], np.int32), np.asarray([700, 0], np.int32))
    assert reconfigure(GROUP, few) == {}
    assert reconfigure(GROUP, counts(0.0, 0.0, tried=0)) == {}


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_the_printed_form_lets_the_worst_draft_as_if_alone(batch: int) -> None:
    """Whatever the batch; in the present batch they draft less the larger it is."""
    mixed = counts(*[0.8] * (batch - 1), 0.4)
    printed = reconfigure(GROUP, mixed, printed=True)[f"r{batch - 1}"]
    alone = [
        (rate(GROUP.draft, GROUP.verify, 1, window, 0.4), OwnPlan(window, mode))
        for mode, rate in ((Mode.COUPLED, coupled_rate), (Mode.DECOUPLED, printed_rate))
        for window in range(1, 17)
    ]
    assert printed == max(alone, key=lambda choice: choice[0])[1]


def test_own_windows_shrink_with_the_batch() -> None:
    windows = [reconfigure(GROUP, counts(*[0.8] * (n - 1), 0.4))[f"r{n - 1}"].window for n in (2, 8, 32, 128)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]


def simulated(plans: dict[str, OwnPlan], rates: list[float], group: Group) -> float:
    """All requests' tokens per millisecond, event by event."""
    requests = []
    for i, p in enumerate(rates):
        plan = plans.get(f"r{i}", OwnPlan(group.window, Mode.DECOUPLED))
        requests.append(naive.Request(plan.window, p, plan.mode is Mode.DECOUPLED))
    return naive.never_waiting(group.draft, group.verify, requests, steps=4000, seed=3)


def test_own_plans_make_a_large_batch_faster_and_printed_ones_less_so() -> None:
    group = Group(AffineTime(0.0, 1.0), AffineTime(0.2, 12.0, 0.3), 3)
    rates = [0.8] * 48 + [0.5] * 16
    own = reconfigure(group, counts(*rates))
    printed = reconfigure(group, counts(*rates), printed=True)
    assert set(own) == set(printed) == {f"r{i}" for i in range(48, 64)}
    same, better, as_printed = (simulated(plans, rates, group) for plans in ({}, own, printed))
    assert better > 1.02 * same
    assert better > 1.005 * as_printed


def test_a_plan_is_due_every_so_many_tokens() -> None:
    reconfigurer = Reconfigurer(every=1000)
    assert [reconfigurer.is_due(400) for _ in range(6)] == [False, False, True, False, False, True]
    assert reconfigurer.plan(GROUP, counts(0.8, 0.8, 0.3)) == reconfigure(GROUP, counts(0.8, 0.8, 0.3))


def test_alone_a_request_is_its_own_batch() -> None:
    assert reconfigure(GROUP, counts(0.1)) == {}


@pytest.mark.parametrize(
    ("tried", "matched", "cause"), [([4], [5], "more drafted tokens match"), ([4, 4], [1, 1], "different lengths")]
)
def test_counts_that_make_no_sense_are_refused(tried: list[int], matched: list[int], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        MatchCounts(("a",), np.asarray(tried, np.int32), np.asarray(matched, np.int32))


def test_intervals_and_windows_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="`every` is 0"):
        Reconfigurer(every=0)
