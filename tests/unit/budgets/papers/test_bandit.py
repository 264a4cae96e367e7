from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vllm_specrollout.budgets.papers.tlt import BucketedBandit, Draw

Means = Callable[[int], np.ndarray]


def _bandit(seed: int = 0, *, thresholds: tuple[int, ...] = (1,), arms: tuple[int, ...] = (4,), epsilon: float = 0.1):
    return BucketedBandit(thresholds, arms, float, epsilon=epsilon, window=16, rng=np.random.default_rng(seed))


def _play(bandit: BucketedBandit[float], steps: int, means: Means, seed: int) -> list[int]:
    rng, drawn = np.random.default_rng(1000 + seed), []
    for step in range(steps):
        draw = bandit.draw(4)
        bandit.record(draw, float(rng.normal(means(step)[draw.arm], 0.15)))
        drawn.append(draw.arm)
    return drawn


def _stationary(step: int) -> np.ndarray:
    return np.asarray([0.4, 1.0, 0.7, 0.5])


def test_the_best_arm_is_found_again_after_the_arms_change_places() -> None:
    def swapped(step: int) -> np.ndarray:
        return _stationary(step) if step < 600 else _stationary(step)[[1, 0, 2, 3]]

    for seed in range(5):
        drawn = _play(_bandit(seed), 1600, swapped, seed)
        assert drawn[400:600].count(1) > 160
        assert drawn[-200:].count(0) > 160


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_it_explores_as_often_as_epsilon_says_and_does_not_tire(epsilon: float) -> None:
    bandit = _bandit(epsilon=epsilon)
    for arm in range(4):
        bandit.record(Draw(0, arm, "test"), _stationary(0)[arm])
    reasons = [bandit.draw(4).reason for _ in range(4000)]
    assert reasons[-1000:].count("explore") == pytest.approx(1000 * epsilon, abs=60)


def test_every_arm_is_tried_first_and_a_reward_of_nothing_is_a_try() -> None:
    bandit = _bandit()
    for arm in range(4):
        draw = bandit.draw(4)
        assert (draw.arm, draw.reason) == (arm, "untried")
        bandit.record(draw, 0.0)
    assert bandit.draw(4).reason != "untried"


def test_an_arm_whose_reward_never_came_is_tried_again() -> None:
    bandit = _bandit()
    assert [bandit.draw(4).arm for _ in range(3)] == [0, 0, 0]


def test_one_lucky_step_does_not_make_an_arm_the_best() -> None:
    bandit = _bandit(arms=(2,), epsilon=0.0)
    for reward in (0.5, 0.5, 100.0):
        bandit.record(Draw(0, 0, "test"), reward)
    bandit.record(Draw(0, 1, "test"), 0.6)
    assert bandit.draw(4) == Draw(0, 1, "exploit")


def test_what_arms_earned_is_valued_when_they_are_compared() -> None:
    prices = {"a": 1.0, "b": 2.0}
    bandit = BucketedBandit([1], [2], prices.__getitem__, epsilon=0.0, window=4, rng=np.random.default_rng(0))
    bandit.record(Draw(0, 0, "test"), "a")
    bandit.record(Draw(0, 1, "test"), "b")
    assert bandit.draw(1).arm == 1
    prices["a"] = 3.0
    assert bandit.draw(1).arm == 0


def test_every_batch_has_a_bucket() -> None:
    bandit = _bandit(thresholds=(1, 2, 8), arms=(1, 1, 1))
    assert [bandit.bucket(batch) for batch in (0, 1, 2, 7, 8, 31, 10_000)] == [0, 0, 1, 1, 2, 2, 2]
    assert bandit.draw(1).reason == "untried"
    bandit.record(bandit.draw(1), 1.0)
    assert bandit.draw(1).reason == "only"


def test_buckets_learn_apart() -> None:
    bandit = _bandit(thresholds=(1, 8), arms=(2, 2), epsilon=0.0)
    for bucket, best in ((0, 1), (1, 0)):
        for arm in (0, 1):
            bandit.record(Draw(bucket, arm, "test"), float(arm == best))
    assert (bandit.draw(3).arm, bandit.draw(9).arm) == (1, 0)
