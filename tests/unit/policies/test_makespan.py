"""What a token is worth: nearly a step to the answer that ends the rollout, little to one that ends early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout.policies.makespan import chances_of_ending_last, level, luck, token_worth, weights


def test_the_longest_answer_ends_last() -> None:
    steps = np.asarray([[10.0, 12.0], [11.0, 13.0], [200.0, 220.0]])
    assert chances_of_ending_last(steps)[2] == pytest.approx(1.0, abs=0.01)


@given(st.lists(st.floats(1.0, 500.0), min_size=1, max_size=12), st.floats(0.0, 5000.0))
def test_what_waits_fills_the_places_like_water(steps: list[float], waiting: float) -> None:
    found = level(np.asarray(steps), waiting)
    assert sum(max(0.0, found - busy) for busy in steps) == pytest.approx(waiting, abs=1e-6)
    assert found >= min(steps) - 1e-9


def test_answers_alike_are_equally_likely_to_end_last() -> None:
    assert chances_of_ending_last(np.tile([5.0, 50.0, 500.0], (4, 1))) == pytest.approx(np.full(4, 0.25))
    assert chances_of_ending_last(np.full((3, 2), 7.0)) == pytest.approx(np.full(3, 1 / 3))


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_chances_agree_with_drawing_lengths_many_times(num: int, cases: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # all differ by a sixtieth of the whole, at the least
    steps = np.sort(1.0 + rng.permutation(60)[: num * cases].reshape(num, cases), axis=1)
    drawn = np.take_along_axis(steps, rng.integers(0, cases, (num, 4000)), axis=1)
    won = np.bincount(drawn.argmax(axis=0), minlength=num) / 4000
    assert np.abs(chances_of_ending_last(steps) - won).max() < 0.08


def _worth(weight: np.ndarray, rate: float, nodes: float, request_ms: float) -> np.ndarray:
    n = len(weight)
    return token_worth(weight, np.full(n, rate), np.full(n, nodes), 12.0, request_ms, 0.2)


def test_where_all_are_alike_a_token_is_worth_what_throughput_says() -> None:
    """8 requests, each 1.5 tokens and 2 nodes a step: 12 tokens in 12 + 8 * (1 + 0.4) ms."""
    assert _worth(np.full(8, 0.125), 1.5, 2.0, 1.0) == pytest.approx(np.full(8, 23.2 / 12.0))


def test_drafts_that_do_not_pay_make_no_token_dearer_than_a_plain_one() -> None:
    assert _worth(np.full(8, 0.125), 1.1, 20.0, 1.0) == pytest.approx(np.full(8, 2.5))


def test_the_long_answers_tokens_are_worth_most() -> None:
    steps = np.asarray([[10.0, 20.0]] * 7 + [[300.0, 400.0]])
    worth = _worth(weights(steps, 1.0), 1.0, 0.0, 0.3)
    assert worth[7] > 10.0 > 1.0 > worth[:7].max()


def test_a_lone_answers_luck_is_the_makespans_and_so_is_that_of_one_known_to_end_last() -> None:
    one = np.asarray([[30.0, 30.0]])
    assert luck(one, 1.0, np.ones(1)) == pytest.approx(1.0)
    long = np.asarray([[10.0, 10.0]] * 7 + [[300.0, 300.0]])
    assert luck(long, 1.0, chances_of_ending_last(long)) == pytest.approx(1.0)


@pytest.mark.parametrize(("batch", "tokens", "gain"), [(2, 64, 1.0), (4, 200, 0.5), (16, 100, 1.0), (64, 400, 2.0)])
def test_luck_foretells_what_the_unluckiest_of_many_answers_gains(batch: int, tokens: int, gain: float) -> None:
    """Equally long answers, whose steps yield a geometric number of tokens: steps that the last saves, of the mean."""
    rng = np.random.default_rng(0)
    gained = rng.geometric(1.0 / (1.0 + gain), (200, batch, tokens))
    steps = (np.cumsum(gained, axis=2) < tokens).sum(axis=2) + 1
    true = (tokens - steps.max(axis=1)).mean() / (tokens - steps).mean()
    told = luck(np.full((batch, 8), tokens / (1.0 + gain)), 1.0 + gain, np.full(batch, 1.0 / batch))
    assert told == pytest.approx(np.full(batch, true), abs=0.06)


def test_chance_counts_for_less_where_lengths_differ_anyway() -> None:
    even = np.full(16, 1 / 16)
    known, guessed = np.full((16, 8), 50.0), np.tile(np.linspace(5.0, 95.0, 8), (16, 1))
    assert luck(known, 1.0, even)[0] < luck(guessed, 1.0, even)[0] < 1.0
