import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.index_cache import MOST, ONE, weight_of

REWARDS = st.none() | st.floats(-1e300, 1e300)


@pytest.mark.parametrize(
    "age, reward, weight",
    [(0, None, 1.0), (0, 0.0, 1.0), (0, 1.0, 2.0), (1, None, 0.5), (2, 1.0, 0.5), (0, -3.0, 1.0), (-1, None, 1.0)],
)
def test_a_weight_falls_with_age_and_grows_with_reward_unless_told_otherwise(age, reward, weight):
    assert weight_of(HistoryConfig(), age, reward) == round(weight * ONE)
    assert weight_of(HistoryConfig(reward_weight=0.0), age, reward) == weight_of(HistoryConfig(), age, None)
    assert weight_of(HistoryConfig(decay=0.0), age, reward) == (0 if age > 0 else round(weight * ONE))


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.25, 0.5), (0.0, 0.0)])
def test_with_a_large_weight_of_rewards_their_largest_sum_wins(rewards):
    """RhymeRL, 5.3. By default 9 wrong answers outweigh 2 right ones, which count twice each."""
    config = HistoryConfig(reward_weight=255.0, decay=1.0)
    wrong = 9 * weight_of(config, 1, 0.0)
    right = sum(weight_of(config, 1, reward) for reward in rewards)
    assert (right > wrong) == (sum(rewards) > 0.0)


@given(st.floats(0, 1), st.floats(0, 1024), st.integers(-3, 1024), REWARDS, REWARDS)
def test_a_weight_is_bounded_and_follows_the_reward(decay, reward_weight, age, reward, other):
    config = HistoryConfig(decay=decay, reward_weight=reward_weight)
    weight = weight_of(config, age, reward)
    assert 0 <= weight <= MOST
    if (reward or 0.0) <= (other or 0.0):
        assert weight <= weight_of(config, age, other)
    assert weight >= weight_of(config, age + 1, reward) or math.isclose(decay, 1.0)
