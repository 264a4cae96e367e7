"""The knee: found where there is one, through noise; a line's roofline where there is none; nothing beyond the data."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.knee import find_knee

_ROWS = np.asarray([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])


def _curve(knee: float, flat: float = 10.0, before: float = 0.0, after: float = 0.2) -> np.ndarray:
    return flat + before * np.minimum(_ROWS, knee) + after * np.maximum(_ROWS - knee, 0.0)


@pytest.mark.parametrize("knee", [16, 32, 64, 96, 128])
def test_a_clean_corner_is_found_where_it_is(knee: int) -> None:
    found = find_knee(_ROWS, _curve(knee))
    assert found is not None and found.is_corner
    assert found.rows == pytest.approx(knee, rel=0.1)
    assert found.ms == pytest.approx(10.0, rel=0.02)


@pytest.mark.parametrize("seed", range(8))
def test_noise_and_outliers_move_it_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(_ROWS, 15)
    ms = np.repeat(_curve(48, before=0.01), 15) * rng.normal(1.0, 0.05, len(rows))
    ms[rng.integers(len(ms), size=8)] *= 5.0
    found = find_knee(rows, ms)
    assert found is not None and found.is_corner
    assert found.rows == pytest.approx(48, rel=0.35)


@pytest.mark.parametrize("seed", range(8))
def test_a_straight_line_has_no_corner_but_the_roofline_of_its_asymptotes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(_ROWS, 15)
    ms = (12.0 + 0.4 * rows) * rng.normal(1.0, 0.03, len(rows))
    found = find_knee(rows, ms)
    assert found is not None and not found.is_corner
    assert found.rows == pytest.approx(30.0, rel=0.15)


@pytest.mark.parametrize("seed", range(8))
def test_level_times_have_no_knee(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(_ROWS, 5)
    assert find_knee(rows, 10.0 * rng.normal(1.0, 0.04, len(rows))) is None


def test_two_row_counts_tell_nothing() -> None:
    assert find_knee([1, 1, 8, 8], [10.0, 10.1, 30.0, 31.0]) is None
    assert find_knee([], []) is None


def test_a_curve_that_flattens_has_no_corner() -> None:
    found = find_knee(_ROWS, 10.0 + 5.0 * np.sqrt(_ROWS))
    assert found is not None and not found.is_corner


def test_time_in_proportion_to_rows_has_its_knee_at_one_row() -> None:
    found = find_knee([1, 2, 4, 8], [1.0, 2.0, 4.0, 8.0])
    assert found is not None and found.rows == 1.0


def test_the_order_and_the_unit_of_the_points_do_not_matter() -> None:
    ms = _curve(64)
    found, other = find_knee(_ROWS, ms), find_knee(_ROWS[::-1], 1000.0 * ms[::-1])
    assert found is not None and other is not None
    assert other.rows == pytest.approx(found.rows)
