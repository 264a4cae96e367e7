from typing import Any

import numpy as np
import pytest

from vllm_specrollout.budgets.papers.knee import find_knee

_ROWS = np.asarray([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])


def _curve(knee: float, before: float = 0.0) -> np.ndarray:
    return 10.0 + before * np.minimum(_ROWS, knee) + 0.2 * np.maximum(_ROWS - knee, 0.0)


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
def test_a_straight_lines_knee_is_where_it_is_a_tenth_above_one_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(_ROWS, 15)
    ms = (12.0 + 0.2 * rows) * rng.normal(1.0, 0.03, len(rows))
    found = find_knee(rows, ms)
    assert found is not None and not found.is_corner
    assert found.rows == pytest.approx(1.0 + 0.1 * 12.2 / 0.2, rel=0.15)
    assert found.ms == pytest.approx(1.1 * 12.2, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "ms", "growth", "knee"),
    [
        ([64, 128, 256], [10.0, 10.0, 26.8], {}, 128),
        ([64, 64, 128, 128], [10.0, 10.0, 19.0, 19.0], {}, 64),
        ([1, 2, 4, 8], [1.0, 2.0, 4.0, 8.0], {}, 1.1),
        (_ROWS, 10.0 + 0.1 * _ROWS, {"growth": 0.5}, 1.0 + 0.5 * 10.1 / 0.1),
    ],
    ids=["the last level one", "a doubling tells", "time in proportion", "how much must have grown is set"],
)
def test_with_few_row_counts_or_a_straight_line_the_knee_is_where_time_has_grown(
    rows: Any, ms: Any, growth: dict[str, float], knee: float
) -> None:
    found = find_knee(rows, ms, **growth)
    assert found is not None and found.rows == pytest.approx(knee)


@pytest.mark.parametrize("seed", range(8))
def test_level_times_have_no_knee(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.repeat(_ROWS, 5)
    assert find_knee(rows, 10.0 * rng.normal(1.0, 0.04, len(rows))) is None


def test_less_than_a_doubling_of_the_rows_tells_nothing() -> None:
    assert find_knee([64, 64, 120, 120], [10.0, 10.1, 30.0, 31.0]) is None
    assert find_knee([], []) is None


def test_a_curve_that_flattens_has_no_corner() -> None:
    found = find_knee(_ROWS, 10.0 + 5.0 * np.sqrt(_ROWS))
    assert found is not None and not found.is_corner


def test_the_order_and_the_unit_of_the_points_do_not_matter() -> None:
    ms = _curve(64)
    found, other = find_knee(_ROWS, ms), find_knee(_ROWS[::-1], 1000.0 * ms[::-1])
    assert found is not None and other is not None
    assert other.rows == pytest.approx(found.rows)
