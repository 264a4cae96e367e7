"""Which rows share a step: every row of an answer as often as the next, none of the held-out ones."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.training.answers import is_held_out
from vllm_specrollout.training.rows import Rows
from vllm_specrollout.training.windows import CONTEXT, Window, Windows, batch_of, counted_rows, whole

LAYERS, WIDTH = 2, 3


def answer(length: int, prompt_tokens: int, number: int, version: int = 1) -> Rows:
    """Row i holds 1000 * number + i, its last state half more; its token is 100 * number + i."""
    rows = 1000.0 * number + torch.arange(length, dtype=torch.float32)
    hidden = rows[:, None, None].repeat(1, LAYERS + 1, WIDTH)
    hidden[:, -1] += 0.5
    return Rows((torch.arange(length) + 100 * number).int(), prompt_tokens, version, hidden)


def answers_that(judge: bool, count: int, length: int = 90, version: int = 1) -> list[Rows]:
    made = (answer(length, 10, number, version) for number in range(1, 10_000))
    return list(islice((one for one in made if is_held_out(one.token_ids.numpy()) == judge), count))


def filled(answers: Iterable[Rows], width: int = 64, epochs: int = 3, seed: int = 0) -> Windows:
    windows = Windows(width, epochs, seed)
    for one in answers:
        windows.add(one)
    return windows


def draws(windows: Windows, batch_rows: int = 128) -> Iterator[Window]:
    """Until nothing is left."""
    while chosen := windows.draw(batch_rows):
        yield from chosen


def drawn(windows: Windows) -> Counter[tuple[int, int]]:
    """(answer's first token, row) -> how often it counted."""
    return Counter((int(one.answer.token_ids[0]), row) for one in draws(windows) for row in range(one.counts, one.end))


@given(st.lists(st.tuples(st.integers(2, 900), st.integers(0, 60)), min_size=1, max_size=6), st.integers(64, 512))
def test_each_row_of_each_answer_counts_three_times_the_tail_as_well(shapes, width):
    kept = [answer(length, min(prompt, length - 1), i + 1) for i, (length, prompt) in enumerate(shapes)]
    windows = filled(kept, width)
    trained = [one for one in kept if counted_rows(one) and not is_held_out(one.token_ids.numpy())]
    expected = {(int(one.token_ids[0]), row): 3 for one in trained for row in counted_rows(one)}
    assert dict(drawn(windows)) == expected
    assert windows.draw(64) == []


@given(st.integers(64, 512), st.integers(0, 99))
def test_no_window_is_wider_than_asked_and_each_begins_with_context(width, seed):
    for one in draws(filled(answers_that(False, 3, length=700), width, seed=seed), 256):
        assert one.end - one.begin <= width
        assert one.counts - one.begin == min(CONTEXT, one.counts - 1)


def test_all_answers_are_gone_over_once_before_one_is_gone_over_again():
    windows = filled(answers_that(False, 4))
    total = 4 * len(counted_rows(answers_that(False, 1)[0]))
    seen: list[tuple[int, int]] = []
    while len(seen) < total:
        for one in windows.draw(1):
            seen += [(int(one.answer.token_ids[0]), row) for row in range(one.counts, one.end)]
    assert len(set(seen)) == total


def test_a_tenth_judges_and_is_never_learned_from_and_only_the_newest_weights_judge():
    judges = answers_that(True, 3)
    windows = filled([*judges, *answers_that(False, 3)])
    assert {int(one.token_ids[0]) for one in windows.held_out()} == {int(one.token_ids[0]) for one in judges}
    assert not {int(one.token_ids[0]) for one in judges} & {first for first, _ in drawn(windows)}
    (newer,) = answers_that(True, 1, length=60, version=2)
    windows.add(newer)
    assert [one.version for one in windows.held_out()] == [2]


def test_answers_of_the_weights_before_are_learned_from_and_older_ones_are_not():
    ages = ((1, 50), (2, 60), (3, 70))
    windows = filled(one for version, length in ages for one in answers_that(False, 2, length=length, version=version))
    assert {one.answer.version for one in draws(windows, 64)} == {2, 3}


def test_the_order_is_the_seeds_and_goes_on_where_it_was_after_a_stop():
    def run(stop_after: int | None) -> list[tuple[int, int]]:
        kept, seen = answers_that(False, 5), []
        windows = filled(kept, epochs=2, seed=5)
        while chosen := windows.draw(100):
            seen += [(int(one.answer.token_ids[0]), one.counts) for one in chosen]
            if stop_after is not None and len(seen) > stop_after:
                state, stop_after = windows.state_dict(), None
                windows = Windows(64, 2, seed=99)
                windows.load_state_dict(state)
                for one in kept:
                    windows.add(one)
        return seen

    assert run(None) == run(4) == run(9)


def test_what_was_gone_over_before_a_stop_is_known_when_it_comes_again():
    first, second = answers_that(False, 2)
    assert drawn(windows := filled([first], epochs=1))
    again = Windows(64, 1, seed=0)
    again.load_state_dict(windows.state_dict())
    assert not again.add(first) and again.add(second)
    assert {name for name, _ in drawn(again)} == {int(second.token_ids[0])}


@given(st.lists(st.tuples(st.integers(3, 90), st.integers(0, 40)), min_size=1, max_size=4), st.integers(2, 10))
def test_each_row_pairs_a_token_with_the_state_before_it_and_looks_as_far_ahead_as_there_are_levels(shapes, levels):
    kept = [answer(length, min(prompt, length - 2), i + 1) for i, (length, prompt) in enumerate(shapes)]
    chosen = whole(kept)
    batch = batch_of(chosen, levels)
    for i, window in enumerate(chosen):
        number, length = int(window.answer.token_ids[0]) // 100, len(window.answer.token_ids)
        for place in range(window.end - window.begin):
            row = window.begin + place
            assert batch.positions[i, place] == row and batch.before[i, place, 0, 0] == 1000 * number + row - 1
            assert bool(batch.counts[i, place]) == (row in counted_rows(window.answer))
            for level in range(min(levels, length - row)):
                assert batch.tokens[i, place + level] == 100 * number + row + level
                assert batch.last[i, place + level, 0] == 1000 * number + row + level + 0.5
        assert batch.rest[i] == length - window.begin


@given(st.integers(3, 3000), st.integers(0, 2000))
def test_a_judged_answer_counts_whole_in_windows_whose_size_is_bounded(length, prompt):
    one = answer(length, min(prompt, length - 1), 1)
    cut = whole([one])
    assert [row for window in cut for row in range(window.counts, window.end)] == list(counted_rows(one))
    assert all(window.end - window.begin <= 1024 for window in cut)
