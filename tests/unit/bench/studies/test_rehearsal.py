"""Decoupled drafting without engines: what the lines yield, given times and which choices hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.rehearsal import Match, Rehearsal, Setting, coupled_tokens, rehearse

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
