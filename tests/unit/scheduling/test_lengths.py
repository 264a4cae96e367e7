"""Expected lengths: from the problem's past, else everybody's, revised as an answer outgrows them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.scheduling.lengths import Lengths

_FAR = 1 << 20


def _known(**problems: list[int]) -> Lengths:
    lengths = Lengths()
    for problem_id, seen in problems.items():
        for length in seen:
            lengths.observe(problem_id, length)
    return lengths


def test_a_problems_own_answers_say_how_long_the_next_will_be() -> None:
    lengths = _known(a=[100, 200, 300], b=[10, 10, 10])
    assert lengths.expected_total("a", 0, _FAR) == 200.0
    assert lengths.expected_total("b", 0, _FAR) == 10.0


def test_what_has_been_outgrown_no_longer_counts() -> None:
    lengths = _known(a=[100, 200, 300])
    assert lengths.expected_total("a", 100, _FAR) == 250.0
    assert lengths.expected_total("a", 250, _FAR) == 300.0


def test_beyond_its_own_past_an_answer_is_expected_to_go_the_way_of_all_others() -> None:
    lengths = _known(a=[10, 20], b=[400])
    assert lengths.expected_total("a", 30, _FAR) == 400.0
    assert lengths.expected_total("never seen", 0, _FAR) == (10 + 20 + 400) / 3


def test_beyond_all_experience_an_answer_is_expected_to_go_on_in_proportion() -> None:
    assert _known(a=[10]).expected_total("a", 1000, _FAR) == 1501.0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(0, 600), st.integers(0, 100))
def test_nothing_is_expected_to_end_before_it_got_here_or_beyond_its_limit(
    seen: list[int], generated: int, room: int
) -> None:
    expected = _known(a=seen).expected_total("a", generated, generated + room)
    assert min(generated, generated + room) <= expected <= generated + room


@given(st.lists(st.integers(1, 500), max_size=3000))
def test_only_recent_lengths_are_remembered(seen: list[int]) -> None:
    lengths = _known(a=seen)
    assert lengths._overall.sorted == sorted(seen[-2048:])
    assert not seen or lengths._problems["a"].sorted == sorted(seen[-64:])


def test_what_is_left_is_guessed_from_answers_that_got_as_far() -> None:
    lengths = _known(a=[100, 200, 300, 400, 500])
    assert lengths.remaining("a", 0, _FAR, 5).tolist() == [100.0, 200.0, 300.0, 400.0, 500.0]
    assert lengths.remaining("a", 100, _FAR, 4).tolist() == [100.0, 200.0, 300.0, 400.0]


def test_few_answers_that_got_as_far_are_joined_by_other_problems() -> None:
    lengths = _known(a=[100, 900], b=[1000] * 9)
    left = lengths.remaining("a", 200, _FAR, 4)
    assert left[0] == 700.0
    assert left[-1] == 800.0


def test_what_has_outgrown_all_answers_goes_on_in_proportion_to_its_length() -> None:
    lengths = _known(a=[10, 20])
    short, long = lengths.remaining("a", 100, _FAR, 8), lengths.remaining("a", 1000, _FAR, 8)
    assert (long > 5.0 * short).all()


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(0, 600), st.integers(1, 700), st.integers(1, 9))
def test_what_is_left_rises_and_stays_within_what_may_be(known: list[int], generated: int, room: int, n: int) -> None:
    left = _known(a=known).remaining("a", generated, generated + room, n)
    assert left.shape == (n,)
    assert (np.diff(left) >= 0.0).all()
    assert 1.0 <= left[0] <= left[-1] <= room


def test_a_known_problems_answers_are_trusted_by_half_and_by_more_the_more_they_are_alike() -> None:
    alike, apart = Lengths(), Lengths()
    for i in range(200):
        alike.observe("a", 100)
        apart.observe("a", (20, 180)[i % 2])
    assert alike.trust("a") > 0.95 and apart.trust("a") == 0.5


def test_of_an_unknown_problem_only_what_all_answers_have_in_common_is_trusted() -> None:
    lengths = Lengths()
    assert lengths.trust("new") == 0.0
    for i in range(100):
        lengths.observe(f"p{i}", 100)
    assert lengths.trust("new") > 0.95
    for i in range(100):
        lengths.observe(f"q{i}", (10, 1000)[i % 2])
    assert lengths.trust("new") == 0.0
