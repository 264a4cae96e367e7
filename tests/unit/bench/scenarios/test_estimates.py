"""What `bench decoupled` learns from runs, and what it expects of others."""

from __future__ import annotations

import pytest

from bench.runner.rows import Pair
from bench.scenarios.decoupled import COUPLED, DECOUPLED, PLAIN, Learned, estimated, line_through, slowed
from vllm_specrollout.errors import ConfigError

ALWAYS = 1.0


def steps(ms: float) -> list[float]:
    return [i * ms / 1e3 for i in range(1, 12)]


@pytest.fixture
def learned(make_run) -> Learned:
    """Plain steps of 10 ms; drafts of a coupled step take 2 ms for each of 4 levels, and its 8 nodes 4 ms in all."""
    stock = make_run([[1] * 11], steps(10.0))
    coupled = make_run([[1] * 11], steps(22.0), steps=11, request_steps=11, drafted=88, draft_ms=88.0)
    beside = make_run([[1] * 11], steps(20.0), steps=11, request_steps=11, drafted=22, draft_ms=0.0)
    found = Learned(ALWAYS)
    pairs = {COUPLED: Pair(stock=stock, ours=coupled), DECOUPLED: Pair(stock=stock, ours=beside)}
    found.add(4, pairs, {"beats": [[100.0, 50, 50], [0.0, 0, 0]]})
    return found


def test_times_are_told_in_plain_steps(learned: Learned) -> None:
    facts = learned.facts(4)
    assert facts.verify == pytest.approx((1.0, 0.05)) and facts.draft == pytest.approx(0.2)
    # one run alone tells no slope of the drafter's; the target's is known, and 2.0 is so many times 1 + 2 * 0.05
    assert facts.verify_beside == pytest.approx((2.0 / 1.1, 0.1 / 1.1))
    assert facts.draft_beside == pytest.approx(0.2)


def test_what_is_expected_follows_from_times_and_match_rates(learned: Learned) -> None:
    expected = estimated(learned.facts(4), window=4)
    assert expected[PLAIN] == 1.0
    # five tokens for 4 levels of 0.2 and a step of 1.4
    assert expected[COUPLED] == pytest.approx(5 / 2.2, rel=0.1)
    # at most a token for each pass of the drafter, and the rows cost something
    assert 1.0 < expected[DECOUPLED] <= 5.0


def test_a_drafter_that_did_nothing_teaches_nothing() -> None:
    with pytest.raises(ConfigError, match="next to nothing"):
        Learned(ALWAYS).facts(4)


def test_a_line_does_not_fall() -> None:
    assert line_through({2: [(0.0, 2.0), (2.0, 1.0)]}, 2) == pytest.approx((1.5, 0.0))
    assert line_through({2: [(0.0, 1.0), (2.0, 2.0)]}, 2) == pytest.approx((1.0, 0.5))


def test_points_close_together_do_not_make_a_slope_of_their_scatter() -> None:
    level, slope = slowed((1.0, 0.1), [(0.8, 1.30), (0.9, 1.45), (1.0, 1.40)])
    assert slope == pytest.approx(0.1 * level)
    assert level * 1.09 == pytest.approx(1.40, abs=0.02)


def test_a_window_has_a_level_of_its_own_and_the_slope_of_all() -> None:
    points = {2: [(0.0, 1.0), (2.0, 2.0), (4.0, 3.0)], 4: [(3.0, 12.5)]}
    assert line_through(points, 2) == pytest.approx((1.0, 0.5))
    assert line_through(points, 4) == pytest.approx((11.0, 0.5))
