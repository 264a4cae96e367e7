"""Shapes and the training schedule are plain arithmetic, checked without torch."""

import pytest
from vllm_specrollout.bench.policy.random_model import SHAPES, shape_of_size
from vllm_specrollout.bench.policy.train import TrainConfig, max_terms_at, rate_at

from vllm_specrollout.errors import ConfigError


@pytest.mark.parametrize("size", SHAPES)
def test_a_size_name_tells_the_number_of_parameters_and_query_heads_divide_evenly_among_kv_heads(size):
    assert SHAPES[size].num_heads % SHAPES[size].num_kv_heads == 0
    assert SHAPES[size].num_params() == pytest.approx(int(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]], rel=0.06)


def test_width_and_depth_can_be_replaced():
    shape = shape_of_size("3M", hidden=64, num_layers=2)
    assert (shape.hidden, shape.num_layers, shape.num_heads) == (64, 2, SHAPES["3M"].num_heads)


def test_an_unknown_size_names_the_known_ones():
    with pytest.raises(ConfigError, match="`size` names '9B', which does not exist"):
        shape_of_size("9B")


def test_the_learning_rate_warms_up_and_falls_to_a_hundredth():
    config = TrainConfig(steps=1000)
    args = (config.steps, config.warmup_steps, config.learning_rate)
    rates = [rate_at(step, *args) for step in range(config.steps)]
    assert max(rates) == pytest.approx(config.learning_rate)
    assert rates.index(max(rates)) in range(config.warmup_steps - 1, config.warmup_steps + 1)
    assert rates[-1] == pytest.approx(config.learning_rate / 100, rel=0.05)


def test_the_curriculum_only_lengthens():
    limits = [max_terms_at(i / 100) for i in range(100)]
    assert limits == sorted(limits)
    assert limits[-1] >= 34
