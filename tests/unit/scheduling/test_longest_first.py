"""Which waiting request gets the next place: the one expected to be longest."""

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.scheduling.longest_first import WINDOW, Queue, Waiting

_FAR = 1 << 20


def _knowing(**problems: list[int]) -> Queue:
    queue = Queue()
    for problem_id, lengths in problems.items():
        for length in lengths:
            queue.observe(problem_id, length)
    return queue


def _waiting(*problems: str, limit: int = _FAR) -> list[Waiting]:
    return [Waiting(name, limit, number) for number, name in enumerate(problems)]


def test_what_is_expected_to_be_longest_goes_first() -> None:
    queue = _knowing(short=[10, 20], middle=[100], long=[900, 700])
    assert queue.order(_waiting("short", "long", "middle", "long")) == [1, 3, 2, 0]


def test_requests_of_unknown_length_stand_where_the_average_answer_does() -> None:
    queue = _knowing(short=[10], long=[900])
    assert queue.order(_waiting("short", "new", "long", "newer")) == [2, 1, 3, 0]


def test_a_limit_on_tokens_is_an_answers_longest_length() -> None:
    queue = _knowing(long=[900], middle=[100])
    cut = Waiting("long", 50, 0)
    assert queue.order([cut, Waiting("middle", _FAR, 1)]) == [1, 0]


@given(st.lists(st.sampled_from(["a", "b", "c", "new"]), max_size=40))
def test_the_order_is_a_permutation_that_keeps_equals_as_they_came(problems: list[str]) -> None:
    queue = _knowing(a=[5], b=[50, 60], c=[500])
    order = queue.order(_waiting(*problems))
    assert sorted(order) == list(range(len(problems)))
    for name in set(problems):
        own = [index for index in order if problems[index] == name]
        assert own == sorted(own)


def test_no_request_is_overtaken_by_those_that_come_much_later() -> None:
    queue = _knowing(short=[10], long=[900])
    waiting = [Waiting("long", _FAR, WINDOW), Waiting("short", _FAR, WINDOW - 1)]
    assert queue.order(waiting) == [1, 0]


def test_nothing_is_ordered_while_no_length_is_known_or_all_find_a_place() -> None:
    queue = Queue()
    queue.arrive()
    assert not queue.is_due(100, 4)
    queue.observe("a", 10)
    assert not queue.is_due(4, 4) and not queue.is_due(100, 0)
    assert queue.is_due(100, 4)


def test_a_long_queue_is_not_ordered_at_every_step() -> None:
    queue = _knowing(a=[10])
    queue.arrive()
    due = [queue.is_due(6400 - step, 1) for step in range(150)]
    assert due[0] and due.count(True) == 2
    queue.arrive()
    assert queue.is_due(6000, 1)


def test_longest_first_is_never_a_third_longer_than_the_best_possible() -> None:
    """Graham's bound, against the lower bound of any schedule; arrival order breaks it."""
    rng = random.Random(3)
    worst = {"longest first": 0.0, "arrival": 0.0}
    for _ in range(200):
        lengths = [round(rng.lognormvariate(4.0, 1.2)) + 1 for _ in range(40)]
        queue = _knowing(**{str(i): [length] for i, length in enumerate(lengths)})
        order = queue.order(_waiting(*map(str, range(40))))
        least = max(max(lengths), sum(lengths) / 8)
        for name, one in (("longest first", order), ("arrival", list(range(40)))):
            worst[name] = max(worst[name], _makespan([lengths[i] for i in one], 8) / least)
    assert worst["longest first"] <= 4 / 3 < worst["arrival"]


def _makespan(lengths: list[int], places: int) -> int:
    busy_until = [0] * places
    for length in lengths:
        place = busy_until.index(min(busy_until))
        busy_until[place] += length
    return max(busy_until)


def test_the_longest_go_first_only_if_they_fit_into_the_kv_cache_side_by_side() -> None:
    queue = _knowing(long=[300] * 20, short=[20] * 20)
    waiting = [Waiting("short", 400, 0, num_prompt=10), Waiting("long", 400, 1, num_prompt=10)]
    running = [Waiting("long", 400, 2, True, num_prompt=10, generated=50)]
    # two places: the two long ones are to have 2 x (10 + 300 + 16) tokens
    assert queue.can_be_longest_first(waiting + running, places=2, capacity=660, block_size=32)
    assert not queue.can_be_longest_first(waiting + running, places=2, capacity=640, block_size=32)
    assert queue.order(waiting) == [1, 0] and queue.order(waiting, is_longest_first=False) == [0, 1]


def test_who_was_preempted_goes_first_in_either_order() -> None:
    queue = _knowing(long=[300], short=[20])
    waiting = [Waiting("long", 400, 3), Waiting("short", 400, 9, True), Waiting("long", 400, 1)]
    assert queue.order(waiting, is_longest_first=False) == [1, 2, 0] and queue.order(waiting)[0] == 1
