"""GRPO: advantages, the clipped objective, and gradients against the plain policy gradient."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from vllm_specrollout.bench.policy.grpo import AnswerGroup, GrpoConfig, GrpoTrainer, clipped_terms, group_advantages
from vllm_specrollout.bench.policy.random_model import make_random_model

from vllm_specrollout.errors import ConfigError

PROMPT = (3, 87, 261)
MIXED = AnswerGroup(prompt_ids=PROMPT, answers=((5, 6, 7), (8, 9), (10, 11, 12, 4)), rewards=(1.0, 0.0, 0.0))
FLAT = AnswerGroup(prompt_ids=(3, 90, 12, 4), answers=((5, 6), (8, 9, 10)), rewards=(1.0, 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "tiny"
    return make_random_model(out, size="1M", hidden=64, num_layers=2, dtype="float32")


def trainer(folder, **settings):
    return GrpoTrainer(folder, GrpoConfig(**settings))


def weights(of):
    return {name: weight.detach().clone() for name, weight in of.model.named_parameters()}


def gradients(of, groups, monkeypatch):
    """What the optimiser is given in the last step of an update; it makes none."""
    seen = {}
    named = list(of.model.named_parameters())
    monkeypatch.setattr(of._optimizer, "step", lambda: seen.update({name: w.grad.clone() for name, w in named}))
    of.update(groups)
    return seen


def policy_gradient(model, groups):
    """-mean over answer tokens of advantage * log p(token), token by token, one answer at a time, no padding."""
    total, count = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        if (rewards == rewards[0]).all():
            continue
        advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        for answer, advantage in zip(group.answers, advantages, strict=True):
            log_p = model(torch.tensor([group.prompt_ids + answer])).logits[0].log_softmax(-1)
            for at, token in enumerate(answer):
                total = total - advantage * log_p[len(group.prompt_ids) + at - 1, token]
                count += 1
    model.zero_grad()
    (total / count).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_rewards_have_no_advantage_whatever_rounding_leaves(reward, count):
    assert group_advantages([reward] * count) == [0.0] * count


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=16).filter(lambda r: max(r) - min(r) > 1e-3))
def test_advantages_sum_to_zero_and_have_variance_one(rewards):
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert sum(a * a for a in advantages) / len(advantages) == pytest.approx(1.0, abs=1e-6)


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(folder, monkeypatch):
    of = trainer(folder, max_norm=1e9)
    wanted = policy_gradient(of.model, [MIXED, FLAT])
    of.model.zero_grad()
    got = gradients(of, [MIXED, FLAT], monkeypatch)
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-2
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_gradient_does_not_depend_on_how_rows_share_forward_passes(folder, monkeypatch):
    whole = gradients(trainer(folder), [MIXED], monkeypatch)
    monkeypatch.setattr("vllm_specrollout.bench.policy.grpo._MICRO_TOKENS", 1)
    apart = gradients(trainer(folder), [MIXED], monkeypatch)
    for name, gradient in whole.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_held"),
    [
        (1.5, 1.0, True),
        (1.3, 1.0, False),
        (1.5, -1.0, False),
        (0.75, -1.0, True),
        (0.5, 1.0, False),
        (0.9, -1.0, False),
    ],
)
def test_the_clip_holds_tokens_that_already_moved_far_enough_to_either_side_and_only_those(ratio, advantage, is_held):
    log_p = torch.tensor([math.log(ratio)], requires_grad=True)
    terms, is_clipped = clipped_terms(log_p, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.4)
    terms.sum().backward()
    assert bool(is_clipped) is is_held
    assert terms.item() == pytest.approx(advantage * (min(max(ratio, 0.8), 1.4) if is_held else ratio))
    assert float(log_p.grad) == pytest.approx(0.0 if is_held else ratio * advantage)


def test_groups_without_variance_move_no_weight(folder):
    of = trainer(folder)
    before = weights(of)
    stats = of.update([FLAT, FLAT])
    assert (stats.flat_share, stats.optimizer_steps) == (1.0, 0)
    assert all(torch.equal(before[name], weight) for name, weight in weights(of).items())


def test_inner_epochs_times_minibatches_optimiser_steps_are_made(folder):
    stats = trainer(folder, inner_epochs=2, minibatches=3, learning_rate=3e-2).update([MIXED])
    assert stats.optimizer_steps == 6
    assert stats.clipped_share > 0.0


def test_saved_weights_load_as_the_same_policy(folder, tmp_path):
    of = trainer(folder)
    of.update([MIXED])
    again = GrpoTrainer(of.save(tmp_path / "saved", "float32"), GrpoConfig())
    assert all(torch.equal(weights(of)[name], weight) for name, weight in weights(again).items())


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"inner_epochs": 0}, "`inner_epochs` is 0, outside 1 to"),
        ({"minibatches": -1}, "`minibatches` is -1, outside 1 to"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0, outside 0 to inf"),
        ({"clip_low": 1.5}, "`clip_low` is 1.5, outside 0 to 1"),
    ],
)
def test_bad_settings_are_refused(settings, cause):
    with pytest.raises(ConfigError, match=cause):
        GrpoConfig(**settings)
