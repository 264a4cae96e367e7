"""Expected lengths: from the problem's past, else everybody's, revised as an answer outgrows them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.policies.das import DasBudget
from vllm_specrollout.policies.length import LengthClass, Lengths
from vllm_specrollout.types import Ending, RequestView, Status, StepTiming

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


def test_classes_follow_the_rank_among_recent_answers() -> None:
    lengths = _known(**{str(i): [10 * i] for i in range(1, 101)})
    assert lengths.classify("10", 0, _FAR) is LengthClass.SHORT
    assert lengths.classify("70", 0, _FAR) is LengthClass.MEDIUM
    assert lengths.classify("95", 0, _FAR) is LengthClass.LONG


def test_a_short_answer_that_goes_on_and_on_becomes_long() -> None:
    lengths = _known(**{str(i): [10 * i] for i in range(1, 101)})
    classes = [lengths.classify("10", generated, _FAR) for generated in (0, 400, 800)]
    assert classes == [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG]


def test_before_anything_is_known_everything_may_be_long() -> None:
    assert Lengths().classify("a", 0, _FAR) is LengthClass.LONG


def _view(problem_id: str, generated: int) -> RequestView:
    return RequestView("r", np.zeros(5 + generated, np.int32), 5, 1000, problem_id=problem_id)


def _das() -> DasBudget:
    budget, none = DasBudget(24, 16), np.zeros(0, np.int32)
    for i in range(1, 101):
        budget.finish(Ending("r", str(i), none, np.zeros(10 * i, np.int32), Status.FINISHED))
    for rows in list(range(1, 33)) * 10:
        budget.observe([], StepTiming(1, rows, rows - 1, 0, 1, 10.0 + 0.2 * rows + (rows > 1) * 0.1, True))
    return budget


def test_das_drafts_most_for_the_long_half_for_the_medium_and_nothing_for_the_short() -> None:
    budget = _das()
    sizes = [decision.max_nodes for decision in budget.decide([_view("95", 0), _view("70", 0), _view("10", 0)])]
    assert sizes[0] > 0
    assert sizes[1:] == [sizes[0] // 2, 0]


def test_das_size_is_the_one_that_ends_an_answer_soonest() -> None:
    budget = _das()
    budget.acceptance = 0.8

    def time_per_token(k: int) -> float:
        expected = sum(0.8**i for i in range(k + 1))
        return budget.cost.predict(4 + k, k) / expected

    assert budget.best_size(4) == int(np.argmin([time_per_token(k) for k in range(17)]))


def test_das_drafts_less_where_less_is_accepted() -> None:
    budget, sizes = _das(), []
    for budget.acceptance in (0.1, 0.5, 0.9):
        sizes.append(budget.best_size(4))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


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
