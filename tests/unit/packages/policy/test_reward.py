"""The reward judges the final sentence, and problem sets never leak between training and evaluation."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.policy.reward import problems, reward, split_of
from vllm_specrollout.bench.policy.tasks import FAMILIES, demonstrate
from vllm_specrollout.bench.policy.tokenizer import split_words

from vllm_specrollout.errors import ConfigError

PROBLEM = problems(1, seed=0)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_right_answers_earn_one(family):
    rng = random.Random(0)
    for problem in problems(50, seed=2, family=family):
        text = demonstrate(problem, rng, slips=False)
        assert reward(problem, text) == 1.0
        assert reward(problem, text + "<|end|>") == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_cut_off_anywhere_earn_nothing(family):
    rng = random.Random(1)
    for problem in problems(10, seed=3, family=family):
        pieces = split_words(demonstrate(problem, rng, slips=False))
        assert all(reward(problem, "".join(pieces[:n])) == 0.0 for n in range(len(pieces)))


def test_negative_answers_are_read_with_or_without_a_space():
    negative = replace(PROBLEM, answer=-5, terms=(-2, -3))
    assert reward(negative, "So the answer is - 5.") == reward(negative, "The answer is -5.") == 1.0
    assert reward(negative, "The answer is 5.") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{answer}",
        "The answer is .",
        "The answer is {answer}",
        "The answer is {answer}. The answer is",
        "The answer is {answer}. No, that is wrong.",
        "The answer is {answer}5.",
        "The answer is 9999999999999999999999.",
        "The answer is\x00{answer}.",
        *(f"The answer is {PROBLEM.answer + wrong}." for wrong in (-99, -1, 1, 10)),
    ],
)
def test_wrong_and_malformed_answers_earn_nothing(text):
    assert reward(PROBLEM, text.format(answer=PROBLEM.answer)) == 0.0


@given(st.text())
def test_any_text_earns_zero_or_one(text):
    assert reward(PROBLEM, text) in (0.0, 1.0)


def test_held_out_and_training_problems_are_disjoint():
    held_out = {p.prompt for p in problems(400, seed=0)} | {p.prompt for p in problems(400, seed=1)}
    train = {p.prompt for p in problems(2000, seed=0, split="train")}
    assert not held_out & train
    assert {split_of(prompt) for prompt in held_out} == {"held_out"}
    assert {split_of(prompt) for prompt in train} == {"train"}


def test_a_set_holds_different_problems_with_different_ids():
    chosen = problems(500, seed=7)
    assert len({p.prompt for p in chosen}) == len({p.problem_id for p in chosen}) == 500


def test_a_set_depends_on_its_seed_alone_and_longer_sets_begin_alike():
    assert problems(20, seed=5) == problems(40, seed=5)[:20]
    assert problems(20, seed=5) != problems(20, seed=6)


def test_families_take_turns_unless_one_is_asked_for():
    assert [p.family for p in problems(4, seed=0)] == ["arith", "puzzle", "arith", "puzzle"]
    assert {p.family for p in problems(10, seed=0, family="puzzle")} == {"puzzle"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"family": "chess"}, "`family` names 'chess', which does not exist\n\nhint: choose from: arith, puzzle"),
        ({"split": "test"}, "`split` names 'test'"),
        ({"count": -1}, "`count` is -1"),
    ],
)
def test_a_bad_count_split_or_family_is_an_error_with_a_hint(given, error):
    with pytest.raises(ConfigError, match=error):
        problems(**{"count": 1, "seed": 0, **given})
