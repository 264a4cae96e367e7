"""Decoupled drafting without engines: what the lines yield, given times and which choices hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster.link import MatchCounts, OwnPlan
from vllm_specrollout.cluster.rates import AffineTime, Mode
from vllm_specrollout.cluster.reconfigure import Group, reconfigure
from vllm_specrollout.cluster.rehearsal import Match, Rehearsal, Setting, Yield, coupled_tokens, rehearse
from vllm_specrollout.errors import ConfigError

ALWAYS = Match(np.zeros(64, np.int32))
NEVER = Match(np.full(64, 5, np.int32))


def setting(match: Match, *, draft_ms: float, **more: Any) -> Setting:
    return Setting(verify_ms=lambda _, rows: 10.0 + rows, draft_ms=lambda _, rows: draft_ms, match=match, **more)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafter_that_is_fast_and_right_yields_a_window_a_step(window: int, batch: int) -> None:
    # Two windows are verified in one step; the drafter hears so as the next step begins, which has none therefore.
    found = rehearse(setting(ALWAYS, draft_ms=0.01, window=window, fan_out=1, batch=batch), rng(), 200)
    assert found.tokens_per_step == pytest.approx(window + 0.5, rel=0.05)
    assert found.drafts_per_step == pytest.approx(window - 0.5, rel=0.05)
    assert found.ms_per_step == pytest.approx(10.0 + batch * (window - 0.5), rel=0.05)


def test_a_drafter_that_is_never_right_costs_its_rows_and_yields_nothing() -> None:
    found = rehearse(setting(NEVER, draft_ms=1.0), rng(), 200)
    assert found.tokens_per_step == 1.0 and found.drafts_per_step == 0.0 and found.ms_per_step == 10.0


def test_a_drafter_slower_than_the_target_yields_nothing_however_right_it_is() -> None:
    assert rehearse(setting(ALWAYS, draft_ms=30.0), rng(), 200).tokens_per_step == 1.0


def test_tokens_a_step_are_at_most_the_passes_that_fit_into_it() -> None:
    found = rehearse(setting(ALWAYS, draft_ms=6.0, window=8, fan_out=1), rng(), 400)
    assert 1.0 < found.tokens_per_step <= found.passes_per_step + 0.05


def test_exits_save_what_a_chain_would_lose() -> None:
    ranks = rng().choice([0, 1, 9], size=4096, p=[0.6, 0.25, 0.15]).astype(np.int32)
    chain, tree = (
        rehearse(setting(Match(ranks), draft_ms=2.0, fan_out=fan_out), rng(), 1000).tokens_per_step
        for fan_out in (1, 2)
    )
    assert tree > 1.2 * chain


def test_nodes_and_levels_stay_below_their_limits() -> None:
    found = rehearse(setting(ALWAYS, draft_ms=0.01, window=8, fan_out=2, most_drafts=5, most_depth=3), rng(), 100)
    assert found.drafts_per_step <= 5.0 and found.tokens_per_step <= 4.0


def test_a_rehearsal_repeats_itself() -> None:
    match = Match.of_shares((0.6, 0.8), rng())
    first, second = (rehearse(setting(match, draft_ms=3.0, batch=2), rng(), 300) for _ in range(2))
    assert first == second


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    window=st.integers(1, 6),
    fan_out=st.integers(1, 4),
)
def test_coupled_tokens_are_those_of_verifying_level_by_level(ranks: list[int], window: int, fan_out: int) -> None:
    steps, left = 0, list(ranks)
    while left:
        steps += 1
        for _ in range(window):
            if not left:
                break
            rank = left.pop(0)
            if rank:
                if rank < fan_out and left:
                    left.pop(0)  # behind a leaf the target's own token follows
                break
        else:
            if left:
                left.pop(0)
    match = Match(np.asarray(ranks, np.int32))
    # the last step may reach beyond what is known
    assert len(ranks) <= round(coupled_tokens(match, window, fan_out) * steps, 6) <= len(ranks) + 1


def test_shares_are_drawn_as_often_as_they_say() -> None:
    match = Match.of_shares((0.5, 0.75), rng(), 40_000)
    assert match.among(1) == pytest.approx(0.5, abs=0.02) and match.among(2) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("among", [(), (0.5, 0.4), (1.5,), (-0.1,)])
def test_shares_that_are_none_are_refused(among: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Match.of_shares(among, rng())


def test_a_match_without_ranks_and_a_rehearsal_without_steps_are_refused() -> None:
    with pytest.raises(ConfigError):
        Match(np.zeros(0, np.int32))
    with pytest.raises(ConfigError):
        rehearse(setting(ALWAYS, draft_ms=1.0), rng(), 0)


def test_waste_is_bounded_in_every_rehearsed_line() -> None:
    match = Match.of_shares((0.6, 0.8), rng())
    rehearsal = Rehearsal(setting(match, draft_ms=2.0, window=3), rng())
    rehearsal.run(300)
    for request in rehearsal._requests:
        line = request.line
        assert line.misses and line.wasted <= (2 * line.window - 1) * line.misses


def mixed(draft: AffineTime, verify: AffineTime, rates: list[float], kind: str) -> Yield:
    """Requests of these match rates, the worst of them with own plans."""
    among = [Match.of_shares((rate, min(rate + 0.12, 0.99)), np.random.default_rng(i)) for i, rate in enumerate(rates)]
    tried = np.full(len(rates), 500, np.int32)
    matched = np.array([round(500 * match.among(1)) for match in among], np.int32)
    counts = MatchCounts(tuple(map(str, range(len(rates)))), tried, matched)
    group = Group(draft, verify, 8)
    plans = {} if kind == "off" else reconfigure(group, counts, printed=kind == "paper")
    assert kind == "off" or len(plans) == rates.count(min(rates))
    times = Setting(
        verify_ms=lambda requests, rows: verify.ms(requests, rows / requests),
        draft_ms=lambda lines, more: draft.ms(lines),
        match=among[0],
        matches=among,
        batch=len(rates),
        window=8,
        fan_out=1,
        plans={int(name): own for name, own in plans.items()},
    )
    return rehearse(times, rng(), 300)


@pytest.mark.parametrize(
    ("draft", "verify", "gain"),
    [
        # a drafter that is fast, and rows that cost something: whoever matches little drafts less
        (AffineTime(0.05, 1.0), AffineTime(0.3, 20.0, 0.3), 1.03),
        # a drafter so slow that there is little to give up
        (AffineTime(0.5, 20.0), AffineTime(1.0, 60.0, 1.0), 0.99),
    ],
)
def test_own_plans_are_worth_something_where_drafts_are_many_and_cost_nothing_elsewhere(
    draft: AffineTime, verify: AffineTime, gain: float
) -> None:
    rates = [0.85] * 9 + [0.4] * 3
    without, own = (mixed(draft, verify, rates, kind) for kind in ("off", "goodput"))
    assert own.rate > gain * without.rate
    assert own.drafts_per_step <= without.drafts_per_step + 0.02


def test_a_coupled_request_drafts_less_and_yields_less() -> None:
    match = Match.of_shares((0.9, 0.95), rng())
    ahead, coupled = (
        rehearse(setting(match, draft_ms=2.0, window=4, plans={0: OwnPlan(4, mode)}), rng(), 600)
        for mode in (Mode.DECOUPLED, Mode.COUPLED)
    )
    assert coupled.passes_per_step < 0.8 * ahead.passes_per_step
    assert coupled.tokens_per_step < 0.9 * ahead.tokens_per_step
