"""The ideal speed-up follows from tokens per step and stock's own step times."""

import pytest

from bench.runner.ideal import at, ideal_speedup, step_times


def test_ideal_is_tokens_per_step_over_the_price_of_a_wider_step():
    times = {1: 10.0, 8: 20.0}
    assert ideal_speedup(8.0, 7.0, times) == 8.0 * 10.0 / 20.0


def test_drafting_nothing_has_an_ideal_of_one():
    assert ideal_speedup(1.0, 0.0, {1: 10.0, 4: 13.0}) == 1.0


def test_step_times_between_measured_points_are_linear_and_beyond_them_constant():
    times = {1: 10.0, 4: 16.0}
    assert at(times, 2) == 12.0
    assert at(times, 0.5) == 10.0
    assert at(times, 9) == 16.0


def test_admitting_requests_is_not_charged_to_wider_steps():
    # extensions cost 5 ms of admission each; a step of 4 tokens really costs 3 ms more than one of 1
    times = step_times([10.0, 10.0, 50.0], {1: [15.0, 15.0], 4: [18.0, 18.0]})
    assert times == {1: 10.0, 4: 13.0}


def test_a_wider_step_never_counts_as_cheaper():
    times = step_times([10.0], {1: [15.0], 4: [12.0], 8: [16.0]})
    assert times == {1: 10.0, 4: 10.0, 8: 11.0}


def test_one_odd_measurement_does_not_move_the_median():
    assert step_times([10.0] * 9 + [1e6], {1: [15.0]})[1] == pytest.approx(10.0)
