from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.budgets.base import Backoff


def asked_at(steps: int, paid: bool = False) -> list[int]:
    backoff, asked = Backoff(), []
    for step in range(steps):
        if not backoff.is_paused(step):
            asked.append(step)
            backoff.asked(step, paid)
    return asked


def test_four_failures_in_a_row_begin_a_pause_of_four_steps_then_eight() -> None:
    assert asked_at(30) == [0, 1, 2, 3, 8, 17]


def test_no_pause_is_longer_than_sixty_four_steps() -> None:
    asked = asked_at(1000)
    assert asked[-1] - asked[-2] == 65


def test_what_pays_is_never_paused() -> None:
    assert asked_at(50, paid=True) == list(range(50))


def test_a_step_that_pays_forgets_all_failures() -> None:
    backoff = Backoff()
    for step in range(4):
        backoff.asked(step, paid=False)
    assert backoff.steps_left(4) == 4
    backoff.asked(8, paid=True)
    for step in range(9, 12):
        backoff.asked(step, paid=False)
        assert not backoff.is_paused(step + 1)
    backoff.asked(12, paid=False)
    assert backoff.steps_left(13) == 4


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 300))
def test_a_pause_ends_when_no_steps_are_left(outcomes: list[bool], later: int) -> None:
    backoff = Backoff()
    for step, paid in enumerate(outcomes):
        backoff.asked(step, paid)
    step = len(outcomes) + later
    assert backoff.is_paused(step) == (backoff.steps_left(step) > 0)
    assert not backoff.is_paused(step + backoff.steps_left(step))
