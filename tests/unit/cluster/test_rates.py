"""Formulas against drafters and verifiers that act token by token (tests/reference/decoupled_rates.py)."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import decoupled_rates as naive
from vllm_specrollout.cluster.rates import AffineTime, coupled_rate, decoupled_rate, plain_rate, timetable
from vllm_specrollout.errors import ConfigError

DRAFTS = st.builds(AffineTime, st.floats(0.0, 0.05), st.floats(0.02, 4.0))
VERIFIERS = st.builds(AffineTime, st.floats(0.0, 0.3), st.floats(1.0, 10.0), st.floats(0.0, 0.2))
BATCHES = st.sampled_from([1, 4, 32])
WINDOWS = st.integers(1, 12)
RATES = st.floats(0.0, 0.95)
_NEAR = 0.02
_ROUNDS = _STEPS = 40_000


def test_a_row_of_a_draft_costs_beside_its_request() -> None:
    time = AffineTime(0.5, 10.0, 0.25)
    assert (time.ms(4), time.ms(4, 3)) == (12.0, 15.0)


def test_workers_share_the_batch_but_not_the_fixed_part() -> None:
    assert AffineTime(0.5, 10.0, 0.25).shared_by(2) == AffineTime(0.25, 10.0, 0.125)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_line_has_finite_terms_of_zero_or_more(value: float) -> None:
    with pytest.raises(ConfigError, match="`fixed_ms` is"):
        AffineTime(1.0, value)


@settings(max_examples=8, derandomize=True)
@given(draft=DRAFTS, verify=VERIFIERS, batch=BATCHES, window=WINDOWS, match_rate=RATES)
def test_coupled_takes_as_long_as_event_by_event(draft, verify, batch, window, match_rate) -> None:
    found = naive.coupled(draft, verify, batch, window, match_rate, rounds=_ROUNDS, seed=1)
    assert coupled_rate(draft, verify, batch, window, match_rate) == pytest.approx(found, rel=_NEAR)


def test_plain_decoding_yields_one_token_a_step() -> None:
    assert plain_rate(AffineTime(0.5, 8.0, 3.0), 4) == 0.1


def measured(draft: AffineTime, verify: AffineTime, batch: int, window: int, p: float) -> float:
    """Of one request."""
    requests = [naive.Request(window, p) for _ in range(batch)]
    return naive.never_waiting(draft, verify, requests, steps=_STEPS // batch, seed=1) / batch


@settings(max_examples=8, derandomize=True)
@given(draft=DRAFTS, verify=VERIFIERS, window=WINDOWS, match_rate=RATES)
def test_one_request_is_as_fast_as_event_by_event(draft, verify, window, match_rate) -> None:
    """Also where a window takes several steps, so that its first tokens are decoded before it arrives."""
    found = measured(draft, verify, 1, window, match_rate)
    assert decoupled_rate(draft, verify, 1, window, match_rate) == pytest.approx(found, rel=_NEAR)


@settings(max_examples=8, derandomize=True)
@given(verify=VERIFIERS, batch=BATCHES, window=WINDOWS, match_rate=RATES, share=st.floats(0.01, 0.99))
def test_a_batch_is_as_fast_as_event_by_event(verify, batch, window, match_rate, share) -> None:
    """Where a window is drafted within a plain step; see docs/concepts/decoupled.md for slower drafters."""
    draft = AffineTime(0.0, share * verify.ms(batch) / max(window, 2))
    found = measured(draft, verify, batch, window, match_rate)
    assert decoupled_rate(draft, verify, batch, window, match_rate) == pytest.approx(found, rel=_NEAR)


@given(draft=DRAFTS, verify=VERIFIERS, window=WINDOWS, match_rate=st.floats(0.0, 1.0))
def test_rows_without_cost_never_make_it_slower_than_plain(draft, verify, window, match_rate) -> None:
    free = AffineTime(verify.per_request_ms, verify.fixed_ms)
    assert decoupled_rate(draft, free, 1, window, match_rate) >= plain_rate(free, 1) * (1.0 - 1e-6)


def test_the_timetable_of_the_page_is_this_one() -> None:
    """Windows of 3 in 12 ms, steps of 10 ms and 1 ms per draft: docs/concepts/planning.md draws it."""
    found = list(islice(timetable(3, 12.0, lambda drafts: 10.0 + drafts), 6))
    assert found == [(0, 10.0), (0, 10.0), (1, 11.0), (2, 12.0), (2, 12.0), (2, 12.0)]


def test_the_example_of_the_page_is_right() -> None:
    draft, verify = AffineTime(0.0, 2.5), AffineTime(0.0, 10.0)
    rates = [rate(draft, verify, 1, 4, 0.8) for rate in (coupled_rate, decoupled_rate)]
    assert [round(1e3 * rate) for rate in rates] == [168, 212]
