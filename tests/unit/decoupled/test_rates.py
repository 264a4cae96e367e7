"""Closed formulas against drafters and verifiers that act token by token (tests/reference/decoupled_rates.py)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import decoupled_rates as naive
from vllm_specrollout.decoupled.rates import (
    NO_EXITS,
    Exits,
    coupled_rate,
    plain_rate,
    printed_rate,
    printed_tokens_per_window,
    tokens_per_window,
    waiting_rate,
)
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.errors import ConfigError

DRAFTS = st.builds(AffineTime, st.floats(0.0, 0.05), st.floats(0.02, 4.0))
VERIFIERS = st.builds(AffineTime, st.floats(0.0, 0.3), st.floats(1.0, 10.0), st.floats(0.0, 0.2))
BATCHES = st.sampled_from([1, 4, 32])
WINDOWS = st.integers(1, 12)
RATES = st.floats(0.0, 0.95)
_NEAR = 0.02
_ROUNDS = 40_000


@pytest.mark.parametrize(
    ("match_rate", "window", "excess"), [(0.5, 2, 0.17), (0.7, 4, 0.21), (0.8, 4, 0.24), (0.8, 8, 0.21), (0.9, 8, 0.26)]
)
def test_the_printed_tau_is_as_much_too_high_as_known(match_rate: float, window: int, excess: float) -> None:
    ratio = printed_tokens_per_window(match_rate, window) / tokens_per_window(match_rate, window)
    assert ratio - 1.0 == pytest.approx(excess, abs=0.005)


@given(match_rate=st.floats(0.0, 1.0), window=WINDOWS)
def test_the_printed_tau_is_never_below_the_exact_one(match_rate: float, window: int) -> None:
    assert printed_tokens_per_window(match_rate, window) >= tokens_per_window(match_rate, window) * (1.0 - 1e-9)


def test_tau_is_exact_at_the_ends() -> None:
    assert tokens_per_window(0.0, 4) == 0.5
    assert tokens_per_window(0.0, 4, balance=0.0) == 1.0
    assert tokens_per_window(1.0, 4) == pytest.approx(4.0, rel=1e-6)


@settings(max_examples=8, derandomize=True)
@given(draft=DRAFTS, verify=VERIFIERS, batch=BATCHES, window=WINDOWS, match_rate=RATES)
def test_waiting_takes_as_long_as_event_by_event(
    draft: AffineTime, verify: AffineTime, batch: int, window: int, match_rate: float
) -> None:
    """Balanced or not: a partly accepted window lasts w D + V, a whole one the longer of both."""
    found = naive.waiting(draft, verify, batch, window, match_rate, rounds=_ROUNDS, seed=1)
    assert waiting_rate(draft, verify, batch, window, match_rate) == pytest.approx(found, rel=_NEAR)


@settings(max_examples=8, derandomize=True)
@given(
    draft=DRAFTS,
    verify=VERIFIERS,
    batch=BATCHES,
    window=WINDOWS,
    match_rate=RATES,
    exits=st.sampled_from([NO_EXITS, Exits(0.6, 1), Exits(0.8, 3)]),
)
def test_coupled_takes_as_long_as_event_by_event(
    draft: AffineTime, verify: AffineTime, batch: int, window: int, match_rate: float, exits: Exits
) -> None:
    given_exits = (exits.probability, exits.width)
    found = naive.coupled(draft, verify, batch, window, match_rate, rounds=_ROUNDS, seed=1, exits=given_exits)
    assert coupled_rate(draft, verify, batch, window, match_rate, exits) == pytest.approx(found, rel=_NEAR)


def test_plain_decoding_yields_one_token_a_step() -> None:
    assert plain_rate(AffineTime(0.5, 8.0, 3.0), 4) == 0.1


def test_the_printed_rate_takes_the_longer_of_drafting_and_verifying() -> None:
    tau = printed_tokens_per_window(0.8, 4)
    assert printed_rate(AffineTime(0.0, 5.0), AffineTime(0.0, 10.0), 1, 4, 0.8) == pytest.approx(tau / 20.0)
    assert printed_rate(AffineTime(0.0, 1.0), AffineTime(0.0, 10.0), 1, 4, 0.8) == pytest.approx(tau / 10.0)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: tokens_per_window(1.1, 4), "`match_rate` is 1.1, outside 0 to 1"),
        (lambda: tokens_per_window(0.5, 0), "a window is 0 tokens long"),
        (lambda: tokens_per_window(0.5, 4, 1.5), "`balance` is 1.5, outside 0 to 1"),
        (lambda: Exits(-0.1), "`exits` is -0.1, outside 0 to 1"),
        (lambda: Exits(0.5, 1, 0.9), "exits of width 1 with a draft factor of 0.9"),
    ],
)
def test_values_out_of_range_are_refused(call, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.cause == cause
