"""What stock is asked where an answer parts from its own, and what is made of what it says."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.runner.runs import Parting
from bench.runner.ties import asked

GREEDY = {"temperature": 0.0, "seed": 7, "max_tokens": 9}
ANSWER = [5, 6, 8, 1]
PARTING = Parting(request=0, position=2, stock=7, ours=8)


def ask(logits, *, repeats=(5, 6), parting=PARTING, params=GREEDY, is_given=False):
    """What `asked` makes of these logits, and what it asked."""
    questions = []

    def look(operation, **question):
        questions.append({"operation": operation, **question})
        return {"token_ids": list(repeats), "logits": logits, "width": 9}

    stock = SimpleNamespace(ask=look)
    return asked(stock, [1, 2, 3], params, ANSWER, parting, "float32", is_given=is_given), questions


@pytest.mark.parametrize(("apart", "is_tie"), [(0.0, True), (5e-5, True), (2e-4, False), (float("inf"), False)])
def test_level_logits_prove_a_tie(apart, is_tie):
    (found, why), (question,) = ask([1.0, 1.0 - apart])
    assert found == is_tie and f"{apart:.1e} apart, 1.0e-04 allowed" in why
    assert (question["prompt"], question["at"], question["candidates"]) == ([1, 2, 3], 2, [7, 8])


def test_a_given_prefix_need_not_be_repeated():
    (found, _), (question,) = ask([1.0, 1.0], repeats=(9,), is_given=True)
    assert found and (question["prompt"], question["at"]) == ([1, 2, 3, 5, 6], 0)
    assert ask([1.0, 1.0], repeats=(5, 9))[0] == (False, "and stock does not repeat itself")


def test_an_answer_that_ends_early_is_no_tie_and_nothing_is_asked():
    early = Parting(request=0, position=2, stock=None, ours=8)
    assert ask([1.0, 1.0], parting=early) == ((False, "where one answer ended"), [])


def test_logits_that_noise_does_not_make_level_are_no_tie():
    """In a process without an engine: the noise's kernel is there all the same."""
    (found, why), _ = ask([0.0, -40.0], params={**GREEDY, "temperature": 1.0})
    assert not found and "apart" in why
