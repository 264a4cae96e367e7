from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.decoupled.times import AffineTime, fit_time
from vllm_specrollout.errors import ConfigError

_TERM = st.floats(0.01, 10.0)


def test_a_row_of_a_draft_costs_beside_its_request() -> None:
    time = AffineTime(0.5, 10.0, 0.25)
    assert time.ms(4) == 12.0
    assert time.ms(4, 3) == 15.0


def test_workers_share_the_batch_but_not_the_fixed_part() -> None:
    assert AffineTime(0.5, 10.0, 0.25).shared_by(2) == AffineTime(0.25, 10.0, 0.125)


@given(fixed=_TERM, per_request=_TERM, per_row=_TERM)
def test_a_fit_finds_the_line_that_made_the_rows(fixed: float, per_request: float, per_row: float) -> None:
    line = AffineTime(per_request, fixed, per_row)
    batch, drafts = np.asarray([1, 8, 64, 8, 64]), np.asarray([0, 0, 0, 4, 8])
    found = fit_time(batch, [line.ms(b, n) for b, n in zip(batch, drafts, strict=True)], drafts)
    shape = (found.time.per_request_ms, found.time.fixed_ms, found.time.per_row_ms)
    assert shape == pytest.approx((per_request, fixed, per_row), rel=1e-4, abs=1e-6)
    assert found.worst_error < 1e-6


def test_a_fit_says_how_far_the_rows_are_from_it() -> None:
    found = fit_time([1, 2, 3, 4], [10.0, 12.0, 10.0, 12.0])
    assert 0.0 < found.error < found.worst_error < 0.2
    assert found.time.per_row_ms == 0.0


def test_no_term_of_a_fit_is_negative() -> None:
    found = fit_time([1, 2, 4], [3.0, 2.0, 1.0]).time
    assert found.per_request_ms == 0.0
    assert 1.0 < found.fixed_ms < 3.0


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        (([1, 2], [1.0]), "different lengths"),
        (([1, 2], [1.0, float("nan")]), "not finite"),
        (([0, 2], [1.0, 1.0]), "a batch below 1"),
        (([1, 2], [0.0, 1.0]), "a time that is not above 0"),
        (([2, 2], [1.0, 1.0]), "does not tell the 2 terms of a line apart"),
        (([1, 2], [1.0, 2.0], [3, 3]), "does not tell the 3 terms of a line apart"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused(columns: tuple, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        fit_time(*columns)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_line_has_finite_terms_of_zero_or_more(value: float) -> None:
    with pytest.raises(ConfigError, match="`fixed_ms` is"):
        AffineTime(1.0, value)
