"""A verifier that never waits, against one that acts event by event (tests/reference/decoupled_rates.py)."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import decoupled_rates as naive
from tests.unit.decoupled.test_rates import BATCHES, DRAFTS, RATES, VERIFIERS, WINDOWS
from vllm_specrollout.decoupled.rates import Exits, coupled_rate, plain_rate, printed_rate, waiting_rate
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.decoupled.timetable import decoupled_rate, shared_stream, step_time, stream, timetable
from vllm_specrollout.errors import ConfigError

_NEAR = 0.02
_STEPS = 40_000


def measured(draft: AffineTime, verify: AffineTime, batch: int, window: int, p: float, **options) -> float:
    """Of one request."""
    is_ahead = options.pop("is_ahead", True)
    requests = [naive.Request(window, p, is_ahead) for _ in range(batch)]
    return naive.never_waiting(draft, verify, requests, steps=_STEPS // batch, seed=1, **options) / batch


@settings(max_examples=8, derandomize=True)
@given(draft=DRAFTS, verify=VERIFIERS, window=WINDOWS, match_rate=RATES)
def test_one_request_is_as_fast_as_event_by_event(
    draft: AffineTime, verify: AffineTime, window: int, match_rate: float
) -> None:
    """Also where a window takes several steps, so that its first tokens are decoded before it arrives."""
    found = measured(draft, verify, 1, window, match_rate)
    assert decoupled_rate(draft, verify, 1, window, match_rate) == pytest.approx(found, rel=_NEAR)


@settings(max_examples=8, derandomize=True)
@given(verify=VERIFIERS, batch=BATCHES, window=WINDOWS, match_rate=RATES, share=st.floats(0.01, 0.99))
def test_a_batch_is_as_fast_as_event_by_event(
    verify: AffineTime, batch: int, window: int, match_rate: float, share: float
) -> None:
    """Where a window is drafted within a plain step; see docs/concepts/decoupled.md for slower drafters."""
    draft = AffineTime(0.0, share * verify.ms(batch) / max(window, 2))
    found = measured(draft, verify, batch, window, match_rate)
    assert decoupled_rate(draft, verify, batch, window, match_rate) == pytest.approx(found, rel=_NEAR)


@settings(max_examples=8, derandomize=True)
@given(
    verify=VERIFIERS,
    batch=BATCHES,
    window=st.integers(2, 12),
    match_rate=RATES,
    share=st.floats(0.01, 0.99),
    covered=st.floats(0.0, 1.0),
)
def test_exits_keep_the_stream_alive_as_event_by_event(
    verify: AffineTime, batch: int, window: int, match_rate: float, share: float, covered: float
) -> None:
    exits = Exits(covered, 2, 1.5)
    draft = AffineTime(0.0, share * verify.ms(batch) / window / exits.draft_factor)
    slower = AffineTime(0.0, draft.fixed_ms * exits.draft_factor)
    found = measured(slower, verify, batch, window, match_rate, exits=covered)
    assert decoupled_rate(draft, verify, batch, window, match_rate, exits) == pytest.approx(found, rel=_NEAR)


@settings(max_examples=8, derandomize=True)
@given(draft=DRAFTS, verify=VERIFIERS, window=WINDOWS, match_rate=RATES)
def test_taking_turns_is_as_fast_as_event_by_event(
    draft: AffineTime, verify: AffineTime, window: int, match_rate: float
) -> None:
    found = measured(draft, verify, 1, window, match_rate, is_ahead=False)
    own = stream(match_rate, window, window * draft.ms(1), step_time(verify, 1, 0.0), is_ahead=False)
    assert own.rate == pytest.approx(found, rel=_NEAR)


@given(draft=DRAFTS, verify=VERIFIERS, window=WINDOWS, match_rate=st.floats(0.0, 1.0))
def test_rows_without_cost_never_make_it_slower_than_plain(
    draft: AffineTime, verify: AffineTime, window: int, match_rate: float
) -> None:
    free = AffineTime(verify.per_request_ms, verify.fixed_ms)
    assert decoupled_rate(draft, free, 1, window, match_rate) >= plain_rate(free, 1) * (1.0 - 1e-6)


@given(fixed=st.floats(1.0, 10.0), window=st.integers(2, 12), match_rate=RATES, share=st.floats(0.0, 1.0))
def test_decoding_meanwhile_beats_waiting_unless_drafting_is_quick(
    fixed: float, window: int, match_rate: float, share: float
) -> None:
    """With free rows: waiting pays if w D / V is below (p - p^w) / (1 - p^w)."""
    verify, draft = AffineTime(0.0, fixed), AffineTime(0.0, share * fixed / window)
    whole = match_rate**window
    quick = (match_rate - whole) / (1.0 - whole)
    gain = decoupled_rate(draft, verify, 1, window, match_rate) / waiting_rate(draft, verify, 1, window, match_rate)
    assert gain >= 1.0 - 1e-9 if share >= quick else gain < 1.0 + 1e-9


def test_a_drafter_slower_than_its_verifier_gives_plain_decoding() -> None:
    draft, verify = AffineTime(0.0, 20.0), AffineTime(0.0, 10.0, 1.0)
    assert decoupled_rate(draft, verify, 1, 4, 0.9) == pytest.approx(plain_rate(verify, 1))


def test_a_perfect_drafter_yields_a_window_a_step() -> None:
    draft, verify = AffineTime(0.0, 2.0), AffineTime(0.0, 10.0, 0.5)
    assert decoupled_rate(draft, verify, 1, 4, 1.0) == pytest.approx(4.0 / 11.5, rel=1e-6)


def test_a_perfect_drafter_is_bound_by_its_own_speed() -> None:
    draft, verify = AffineTime(0.0, 4.0), AffineTime(0.0, 10.0)
    assert decoupled_rate(draft, verify, 1, 6, 1.0) == pytest.approx(1.0 / 4.0, rel=0.01)


def test_the_timetable_of_the_page_is_this_one() -> None:
    """Windows of 3 in 12 ms, steps of 10 ms and 1 ms per draft: docs/concepts/decoupled.md draws it."""
    found = list(islice(timetable(3, 12.0, lambda drafts: 10.0 + drafts), 6))
    assert found == [(0, 10.0), (0, 10.0), (1, 11.0), (2, 12.0), (2, 12.0), (2, 12.0)]


def test_the_example_of_the_page_is_right() -> None:
    draft, verify = AffineTime(0.0, 2.5), AffineTime(0.0, 10.0)
    rates = [rate(draft, verify, 1, 4, 0.8) for rate in (coupled_rate, waiting_rate, printed_rate, decoupled_rate)]
    rates.append(decoupled_rate(draft, verify, 1, 4, 0.8, Exits(0.5, 1)))
    assert [round(1e3 * rate) for rate in rates] == [168, 186, 230, 212, 247]


def test_no_step_verifies_more_than_one_window() -> None:
    sizes = [drafts for drafts, _ in islice(timetable(4, 1.0, lambda drafts: 10.0), 50)]
    assert sizes == [0, *[3] * 49]


def test_exits_that_always_hit_are_as_good_as_perfect_drafts() -> None:
    draft, verify = AffineTime(0.0, 2.0), AffineTime(0.0, 10.0)
    found = shared_stream(draft, verify, 1, 4, 0.5, Exits(1.0, 3))
    assert found.drafts == pytest.approx(3.0)


@pytest.mark.parametrize(("window", "ms"), [(0, 1.0), (2, -1.0)])
def test_windows_that_make_no_sense_are_refused(window: int, ms: float) -> None:
    with pytest.raises(ConfigError, match=f"a window of {window} tokens"):
        stream(0.5, window, ms, lambda drafts: 1.0)
