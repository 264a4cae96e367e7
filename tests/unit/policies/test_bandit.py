"""The bandit: tries everything once, settles on the best, notices changes, and repeats itself under a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.policies.bandit import BucketedBandit, Draw

Means = Callable[[int], np.ndarray]


def _bandit(seed: int = 0, *, arms: int = 4, **kwargs: float) -> BucketedBandit:
    return BucketedBandit([1], [arms], rng=np.random.default_rng(seed), **kwargs)  # type: ignore[arg-type]


def _play(bandit: BucketedBandit, steps: int, means: Means, seed: int) -> tuple[list[int], np.ndarray]:
    """The arms drawn, and [steps] how much worse each was than the best one at that time."""
    rng, drawn, regret = np.random.default_rng(1000 + seed), [], []
    for step in range(steps):
        draw = bandit.draw(4)
        now = means(step)
        bandit.record(draw, 4, float(rng.normal(now[draw.arm], 0.15)))
        drawn.append(draw.arm)
        regret.append(now.max() - now[draw.arm])
    return drawn, np.asarray(regret)


def _stationary(step: int) -> np.ndarray:
    return np.asarray([0.4, 1.0, 0.7, 0.5])


def test_regret_grows_slower_than_time_on_arms_that_stay_as_they_are() -> None:
    short, long = 1000, 4000
    regrets = [_play(_bandit(seed), long, _stationary, seed)[1] for seed in range(10)]
    early = np.mean([r[:short].mean() for r in regrets])
    late = np.mean([r.mean() for r in regrets])
    last = np.mean([r[-short:].mean() for r in regrets])
    # a constant epsilon of 0.1 would lose 0.035 a step for ever
    assert late < 0.75 * early
    assert last < 0.6 * early
    assert last < 0.02


def test_the_best_arm_is_found_again_after_the_arms_change_places() -> None:
    def swapped(step: int) -> np.ndarray:
        return _stationary(step) if step < 600 else _stationary(step)[[1, 0, 2, 3]]

    for seed in range(5):
        drawn, _ = _play(_bandit(seed), 1600, swapped, seed)
        assert drawn[400:600].count(1) > 160
        assert drawn[-200:].count(0) > 160


def test_a_restart_looks_around_as_much_as_at_first() -> None:
    bandit = _bandit(epsilon=0.5)
    drawn, _ = _play(bandit, 4000, _stationary, 0)
    settled = np.mean(np.asarray(drawn[-400:]) != 1)
    bandit.restart()
    again, _ = _play(bandit, 100, _stationary, 1)
    assert settled < 0.2 < np.mean(np.asarray(again) != 1)


def test_under_one_seed_it_always_plays_the_same() -> None:
    assert _play(_bandit(7), 300, _stationary, 0)[0] == _play(_bandit(7), 300, _stationary, 0)[0]
    assert _play(_bandit(7), 300, _stationary, 0)[0] != _play(_bandit(8), 300, _stationary, 0)[0]


def test_every_arm_is_tried_before_any_is_repeated_and_a_reward_of_nothing_counts_as_tried() -> None:
    bandit = _bandit()
    for arm in range(4):
        draw = bandit.draw(4)
        assert (draw.arm, draw.reason) == (arm, "untried")
        bandit.record(draw, 4, 0.0)
    assert bandit.draw(4).reason != "untried"


def test_an_arm_whose_reward_never_came_is_tried_again() -> None:
    bandit = _bandit()
    assert [bandit.draw(4).arm for _ in range(3)] == [0, 0, 0]


def test_an_arm_last_tried_at_a_larger_batch_is_not_better_for_it() -> None:
    bandit = BucketedBandit([1], [2], epsilon=0.0, rng=np.random.default_rng(0))
    for _ in range(4):
        bandit.record(Draw(0, 0, "test"), 16, 16 * 0.5)
        bandit.record(Draw(0, 1, "test"), 4, 4 * 0.6)
    assert bandit.draw(4) == Draw(0, 1, "exploit")


def test_a_reward_earned_in_another_bucket_is_dropped() -> None:
    bandit = BucketedBandit([1, 8], [1, 1], rng=np.random.default_rng(0))
    draw = bandit.draw(7)
    bandit.record(draw, 8, 1.0)
    assert bandit.draw(7).reason == "untried"
    bandit.record(draw, 7, 1.0)
    assert bandit.draw(7).reason == "only"


def test_every_batch_has_a_bucket() -> None:
    bandit = BucketedBandit([1, 2, 8], [1, 1, 1], rng=np.random.default_rng(0))
    assert [bandit.bucket(batch) for batch in (0, 1, 2, 7, 8, 31, 10_000)] == [0, 0, 1, 1, 2, 2, 2]


def test_buckets_learn_apart() -> None:
    bandit = BucketedBandit([1, 8], [2, 2], epsilon=0.0, rng=np.random.default_rng(0))
    for bucket, best in ((0, 1), (1, 0)):
        for arm in (0, 1):
            bandit.record(Draw(bucket, arm, "test"), 1 if bucket == 0 else 8, float(arm == best))
    assert (bandit.draw(3).arm, bandit.draw(9).arm) == (1, 0)


@pytest.mark.parametrize(
    ("thresholds", "arms"), [([2, 8], [1, 1]), ([1, 8, 8], [1, 1, 1]), ([], []), ([1, 8], [1]), ([1], [0])]
)
def test_a_table_with_a_hole_is_refused(thresholds: list[int], arms: list[int]) -> None:
    with pytest.raises(ConfigError, match="hint: start at 1, ascend"):
        BucketedBandit(thresholds, arms, rng=np.random.default_rng(0))
