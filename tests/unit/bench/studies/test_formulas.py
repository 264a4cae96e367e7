import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_specrollout.bench.studies.formulas import (
    MAX_WINDOW,
    StepLine,
    best_window,
    exact_rate,
    printed_rate,
    printed_tokens_per_window,
    tokens_per_window,
)

from tests.reference import decoupled_rates as naive
from tests.unit.bench.studies.builders import DRAFTER, VERIFIER
from vllm_specrollout.cluster.rates import AffineTime, coupled_rate, decoupled_rate, plain_rate
from vllm_specrollout.errors import ConfigError

terms = st.floats(0.0, 100.0)


def test_rows_cost_more_beyond_the_knee_alone():
    line = StepLine(base=10.0, request=0.5, row=0.1, steep=0.3, knee=20.0)
    assert [line.step_ms(2), line.step_ms(2, 18), line.step_ms(2, 28)] == pytest.approx([11.2, 13.0, 16.0])


@given(terms, terms, terms, terms, terms, st.integers(0, 500), st.integers(0, 500))
def test_a_step_never_gets_shorter_with_more_rows(base, request, row, steep, knee, rows, more):
    line = StepLine(base=base, request=request, row=row, steep=steep, knee=knee)
    assert line.step_ms(1, rows + more) >= line.step_ms(1, rows) * (1 - 1e-12)


@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_term_below_nothing_is_refused(value):
    with pytest.raises(ConfigError, match="below 0"):
        StepLine(base=1.0, row=value)


def test_coupled_speed_by_hand():
    # 1 + 0.5 + 0.25 tokens in 2 * 2 + 10 ms
    assert coupled_rate(StepLine(base=2.0), StepLine(base=10.0), 1, 2, 0.5) == pytest.approx(1.75 / 14.0)


def test_decoupled_speed_by_hand():
    # ready: 1 + p tokens, stays so with p**2; not ready: 1 token, gets ready with p; half: 0.5 / (1 - 0.25 + 0.5) = 0.4
    found = decoupled_rate(StepLine(base=1.0), StepLine(base=10.0), 4, 2, 0.5)
    assert found == pytest.approx((0.4 * 1.5 + 0.6) / 10.0)


def test_a_window_that_is_always_right_takes_one_period():
    for rate in (exact_rate, printed_rate):
        assert rate(StepLine(base=1.0), StepLine(base=10.0), 1, 4, 1.0) == pytest.approx(0.4)


@given(st.floats(0.0, 1.0), st.integers(1, MAX_WINDOW))
def test_the_printed_speed_is_never_below_the_exact_one(p, window):
    printed, exact = (rate(DRAFTER, VERIFIER, 8, window, p) for rate in (printed_rate, exact_rate))
    assert printed >= exact * (1 - 1e-9)


def test_the_best_window_grows_with_the_acceptance_and_shrinks_with_the_batch():
    coupled = [best_window(coupled_rate, p, 1, VERIFIER, DRAFTER) for p in (0.2, 0.5, 0.8, 0.95)]
    assert coupled == sorted(coupled) and coupled[0] < coupled[-1] <= MAX_WINDOW
    ahead = [best_window(decoupled_rate, 0.8, batch, VERIFIER, DRAFTER) for batch in (1, 128, 320)]
    assert ahead == sorted(ahead, reverse=True) and ahead[0] > ahead[-1]


def test_drafts_that_cost_nothing_never_lose_to_plain_decoding():
    flat, free = StepLine(base=10.0), StepLine(base=0.0)
    for p in (0.0, 0.3, 0.9):
        assert coupled_rate(free, flat, 8, 4, p) >= plain_rate(flat, 8)


@pytest.mark.parametrize(
    ("match_rate", "window", "excess"), [(0.5, 2, 0.17), (0.7, 4, 0.21), (0.8, 4, 0.24), (0.8, 8, 0.21), (0.9, 8, 0.26)]
)
def test_the_printed_tau_is_as_much_too_high_as_known(match_rate: float, window: int, excess: float) -> None:
    ratio = printed_tokens_per_window(match_rate, window) / tokens_per_window(match_rate, window)
    assert ratio - 1.0 == pytest.approx(excess, abs=0.005)


@given(match_rate=st.floats(0.0, 1.0), window=st.integers(1, 12))
def test_the_printed_tau_is_never_below_the_exact_one(match_rate: float, window: int) -> None:
    assert printed_tokens_per_window(match_rate, window) >= tokens_per_window(match_rate, window) * (1.0 - 1e-9)


def test_tau_is_exact_at_the_ends() -> None:
    assert tokens_per_window(0.0, 4) == 0.5
    assert tokens_per_window(1.0, 4) == pytest.approx(4.0, rel=1e-6)


@settings(max_examples=8, derandomize=True)
@given(
    verify=st.builds(AffineTime, st.floats(0.0, 0.3), st.floats(1.0, 10.0), st.floats(0.0, 0.2)),
    window=st.integers(1, 12),
    match_rate=st.floats(0.0, 0.95),
)
def test_the_exact_tau_is_that_of_a_verifier_that_waits_event_by_event(
    verify: AffineTime, window: int, match_rate: float
) -> None:
    draft = AffineTime(0.0, verify.ms(1, window - 1) / window)
    found = naive.waiting(draft, verify, 1, window, match_rate, rounds=40_000, seed=1) * verify.ms(1, window - 1)
    assert tokens_per_window(match_rate, window) == pytest.approx(found, rel=0.02)


def test_the_printed_rate_takes_the_longer_of_drafting_and_verifying() -> None:
    tau = printed_tokens_per_window(0.8, 4)
    assert printed_rate(AffineTime(0.0, 5.0), AffineTime(0.0, 10.0), 1, 4, 0.8) == pytest.approx(tau / 20.0)
    assert printed_rate(AffineTime(0.0, 1.0), AffineTime(0.0, 10.0), 1, 4, 0.8) == pytest.approx(tau / 10.0)
