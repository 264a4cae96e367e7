"""Problems and demonstrations: right by construction, repeatable, long-tailed, and alike to the degree promised."""

import random
import re
import statistics

from hypothesis import given
from hypothesis import strategies as st
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import FAMILIES, STYLES, demonstrate, make_problem
from vllm_specrollout.bench.policy.tokenizer import LARGEST_NUMBER, NUMBERS, WORDS, split_words

SEEDS = st.integers(0, 10_000)


def _lines_of_terms(text):
    """The restated expressions of an answer, as lists of signed numbers."""
    return [_numbers(line) for line in text.splitlines() if re.match(r"=|Left:", line)]


def _numbers(text):
    return [int(n.replace(" ", "")) for n in re.findall(r"-? \d+", text)]


@given(seed=SEEDS, family=st.sampled_from(FAMILIES))
def test_the_answer_is_the_sum_of_the_terms_in_the_prompt(seed, family):
    problem = make_problem(random.Random(seed), family, "p")
    numbers = _numbers(problem.prompt)
    assert sum(numbers) == problem.answer == sum(problem.terms)
    assert problem.size == len(numbers) <= STYLES[family].max_terms


@given(seed=SEEDS, family=st.sampled_from(FAMILIES))
def test_demonstrations_use_only_words_of_the_vocabulary_and_every_number_is_one_token(seed, family):
    rng = random.Random(seed)
    problem = make_problem(rng, family, "p")
    pieces = split_words(problem.prompt) + split_words(text := demonstrate(problem, rng))
    assert {piece for piece in pieces if len(piece) > 1} <= set(WORDS)
    assert max(int(n) for n in re.findall(r"\d+", text)) <= LARGEST_NUMBER
    assert all(piece in NUMBERS for piece in split_words(text) if piece.strip().isdigit())


@given(seed=SEEDS)
def test_without_slips_every_restated_line_of_arith_that_is_not_mended_keeps_the_sum(seed):
    rng = random.Random(seed)
    problem = make_problem(rng, "arith", "p")
    text = demonstrate(problem, rng, slips=False)
    if "wrong" not in text and "slip" not in text:
        assert {sum(terms) for terms in _lines_of_terms(text)} == {problem.answer}


def test_a_noticed_wrong_turn_is_mended_on_the_next_line():
    rng = random.Random(0)
    seen = 0
    for problem in problems(200, seed=1, family="puzzle"):
        text = demonstrate(problem, rng, slips=False)
        seen += "wrong" in text or "slip" in text
        assert _lines_of_terms(text)[-1] == [problem.answer]
    assert seen > 20


def test_equal_seeds_write_equal_demonstrations():
    problem = make_problem(random.Random(3), "puzzle", "p")
    assert demonstrate(problem, random.Random(4)) == demonstrate(problem, random.Random(4))


def test_answer_lengths_have_a_long_tail():
    rng = random.Random(0)
    lengths = sorted(len(split_words(demonstrate(p, rng))) for p in problems(1500, seed=0))
    assert 45 <= statistics.median(lengths) <= 80
    assert 12 * statistics.median(lengths) <= lengths[-1] <= 1500


@given(st.text())
def test_cut_pieces_join_to_the_text(text):
    assert "".join(split_words(text)) == text
