import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.budgets.base import Backoff


def asked_at(steps: int, paid: bool = False) -> list[int]:
    backoff, asked = Backoff(), []
    for step in range(steps):
        if not backoff.steps_left(step, 8):
            asked.append(step)
            backoff.asked(step, 8, paid)
    return asked


def test_four_failures_in_a_row_begin_a_pause_of_four_steps_and_each_next_one_is_twice_as_long_up_to_64() -> None:
    assert np.diff(asked_at(300)).tolist() == [1, 1, 1, 5, 9, 17, 33, 65, 65, 65]


def test_what_pays_is_never_paused() -> None:
    assert asked_at(50, paid=True) == list(range(50))


def test_a_step_that_pays_forgets_all_failures() -> None:
    backoff = Backoff()
    for step in range(4):
        backoff.asked(step, 8, paid=False)
    assert backoff.steps_left(4, 8) == 4
    backoff.asked(8, 8, paid=True)
    for step in range(9, 12):
        backoff.asked(step, 8, paid=False)
        assert not backoff.steps_left(step + 1, 8)
    backoff.asked(12, 8, paid=False)
    assert backoff.steps_left(13, 8) == 4


def test_a_batch_of_another_size_is_asked_at_once_and_paused_for_four_steps_at_first() -> None:
    backoff = Backoff()
    for step in range(100):
        if not backoff.steps_left(step, 64):
            backoff.asked(step, 64, paid=False)
    assert backoff.steps_left(100, 64) > 8
    assert backoff.steps_left(100, 32) == backoff.steps_left(100, 128) == backoff.steps_left(100, 64)
    for size in (31, 129):
        assert backoff.steps_left(100, size) == 0
    backoff.asked(100, 31, paid=False)
    assert backoff.steps_left(101, 31) == 4
    # as a rollout begins behind the last one's tail
    assert backoff.steps_left(101, 64) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40), st.integers(0, 300), st.integers(0, 9))
def test_a_pause_ends_when_no_steps_are_left(outcomes: list[tuple[bool, int]], later: int, size: int) -> None:
    backoff = Backoff()
    for step, (paid, of) in enumerate(outcomes):
        backoff.asked(step, of, paid)
    step = len(outcomes) + later
    assert backoff.steps_left(step + backoff.steps_left(step, size), size) == 0
