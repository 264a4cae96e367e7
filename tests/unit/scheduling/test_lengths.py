"""Expected lengths: from the problem's past, else everybody's, revised as an answer outgrows them."""

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


def test_the_median_is_that_of_the_newest_answers() -> None:
    lengths = _known(a=[900, 10, 30, 20])
    assert lengths.median("a", 3) == 20 and lengths.median("a", 99) == 25 and lengths.median("b", 3) is None


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
def test_nothing_is_expected_to_end_before_it_got_here_or_beyond_its_limit(seen, generated, room) -> None:
    expected = _known(a=seen).expected_total("a", generated, generated + room)
    assert min(generated, generated + room) <= expected <= generated + room


@given(st.lists(st.integers(1, 500), max_size=3000))
def test_only_recent_lengths_are_remembered(seen: list[int]) -> None:
    lengths = _known(a=seen)
    assert lengths._overall.sorted == sorted(seen[-2048:])
    assert not seen or lengths._problems["a"].sorted == sorted(seen[-64:])
