"""What grows is found, and what only moves is not."""

import random

import pytest

from bench.soak.growth import LEAST_SAMPLES, growth

TIMES = [5.0 * i for i in range(361)]


def settled(values, after=300.0):
    return growth(TIMES, values, after)


def test_what_stays_does_not_grow():
    found = settled([100.0] * 361)
    assert (found.first, found.last, found.share, found.difference, found.slope) == (100.0, 100.0, 0.0, 0.0, 0.0)


def test_a_leak_is_its_rate():
    # 12 an hour, upon 100
    found = settled([100.0 + 12.0 * at / 3600.0 for at in TIMES])
    assert found.slope == pytest.approx(12.0)
    # the quarters' medians are three quarters of 25 minutes apart
    assert found.difference == pytest.approx(12.0 * 0.75 * 1500.0 / 3600.0, rel=0.02)
    assert found.share == pytest.approx(0.0365, abs=0.001)


def test_what_was_taken_before_it_settled_is_no_growth():
    assert settled([50.0 if at < 300.0 else 100.0 for at in TIMES]).share == 0.0


def test_peaks_are_no_growth():
    rng = random.Random(1)
    assert abs(settled([100.0 + (40.0 if rng.random() < 0.2 else 0.0) for _ in TIMES]).share) < 1e-9


def test_one_step_upwards_is_growth_wherever_it_comes():
    for minute in (12, 20, 25):
        assert settled([100.0 if at < 60.0 * minute else 103.0 for at in TIMES]).share > 0.02


def test_of_too_few_samples_nothing_is_said():
    found = growth(TIMES[: LEAST_SAMPLES - 1], [1.0] * (LEAST_SAMPLES - 1), 0.0)
    assert (found.first, found.share, found.difference, found.slope) == (None, None, None, None)
