"""The ring of answers: what is kept, and what is handed out, how often."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.training.answers import MOST_TIMES, AnswerRing, is_held_out
from vllm_specrollout.types import Answer, FinishReason

PROMPT = np.array([7, 8, 9], dtype=np.int32)


def ending(first: int, length: int, version: int = 0, status: FinishReason = FinishReason.FINISHED) -> Answer:
    """An answer that its first token tells apart."""
    tokens = np.arange(first, first + length, dtype=np.int32)
    return Answer(f"r{first}", "p", PROMPT, tokens, status, version)


def firsts(ring: AnswerRing, version: int, most_tokens: int = 1 << 20) -> list[int]:
    return [int(one.token_ids[one.prompt_tokens]) for one in ring.take(version, most_tokens)]


def test_an_answer_is_kept_whole_with_its_prompt() -> None:
    ring = AnswerRing()
    ring.finished(ending(100, 6000, version=4))
    (found,) = ring.take(4, 16)
    assert found.token_ids.dtype == np.int32 and found.token_ids.tolist() == [7, 8, 9, *range(100, 6100)]
    assert found.prompt_tokens == 3 and found.version == 4


def test_what_was_aborted_or_has_no_token_is_not_kept() -> None:
    ring = AnswerRing()
    ring.finished(ending(100, 5, status=FinishReason.ABORTED))
    ring.finished(ending(200, 0))
    ring.finished(ending(300, 5, status=FinishReason.TRUNCATED))
    assert len(ring) == 1 and firsts(ring, 0) == [300]


def test_each_answer_is_handed_out_three_times_at_most_and_the_least_seen_first() -> None:
    ring = AnswerRing()
    for first, length in ((100, 4), (200, 6), (300, 5)):
        ring.finished(ending(first, length))
    assert firsts(ring, 0) == [200, 300, 100]
    ring.finished(ending(400, 1))
    assert firsts(ring, 0) == [400, 200, 300, 100]
    assert firsts(ring, 0) == [400, 200, 300, 100]
    assert firsts(ring, 0) == [400]
    ring.finished(ending(200, 6))  # the very same again
    assert len(ring) == 4 and firsts(ring, 0) == []


def test_no_answer_of_other_weights_is_handed_out_but_long_ones_of_the_version_before() -> None:
    ring = AnswerRing()
    for first, length, version in ((100, 90, 1), (200, 50, 3), (300, 20, 3), (400, 70, 3), (500, 30, 4), (600, 10, 4)):
        ring.finished(ending(first, length, version))
    assert firsts(ring, 4) == [500, 600, 400, 200]
    ring.finished(ending(700, 60, 4))
    assert firsts(ring, 4) == [700, 500, 600, 400]
    # one that is ahead of what the engine computes with is not asked for
    assert firsts(ring, 3) == [300, 200, 400, 100]


def test_before_the_first_answer_of_new_weights_all_of_the_version_before_stand_in() -> None:
    ring = AnswerRing()
    ring.finished(ending(100, 5, 1))
    ring.finished(ending(200, 9, 1))
    assert firsts(ring, 2) == [200, 100]


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 200))
def test_the_ring_is_bounded_and_forgets_the_oldest(lengths: list[int], most: int) -> None:
    ring = AnswerRing(most)
    kept: list[tuple[int, int]] = []
    for i, length in enumerate(lengths):
        ring.finished(ending(1000 * i, length))
        kept.append((1000 * i, length + len(PROMPT)))
        while sum(tokens for _, tokens in kept) > most:
            kept.pop(0)
    assert ring.num_tokens == sum(tokens for _, tokens in kept) <= most and len(ring) == len(kept)
    assert sorted(firsts(ring, 0)) == [first for first, _ in kept]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 150))
def test_a_turn_has_so_many_tokens_at_most_or_one_answer_and_all_have_theirs(lengths: list[int], most: int) -> None:
    ring, times = AnswerRing(), Counter[int]()
    for i, length in enumerate(lengths):
        ring.finished(ending(1000 * i, length))
    while found := ring.take(0, most):
        assert len(found) == 1 or sum(len(one.token_ids) for one in found) <= most
        times.update(int(one.token_ids[3]) for one in found)
    assert times == {1000 * i: MOST_TIMES for i in range(len(lengths))}


def test_the_same_tenth_is_always_held_out() -> None:
    held = [is_held_out(np.arange(first, first + 20, dtype=np.int32)) for first in range(2000)]
    again = [is_held_out(np.arange(first, first + 20, dtype=np.int64).astype(np.int32)) for first in range(2000)]
    assert 140 < sum(held) < 260 and held == again
