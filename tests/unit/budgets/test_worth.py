import numpy as np

from tests.unit.budgets.builders import chains
from vllm_specrollout.budgets.base import CHEAP, FIRST_PAUSE, PATIENCE, Worth
from vllm_specrollout.types import StepPlan

SOURCES = {"history": (0, 1), "model": (1, 2)}
TOKEN_MS = 2.0


def plan(reach: float) -> StepPlan:
    """Two requests with one node each, in a step of 5 ms where a plain one takes 4."""
    return StepPlan(chains(2, 1), "goodput", reach=np.full(2, reach, np.float32), expected_ms=5.0, plain_ms=4.0)


def paused(worth: Worth, name: str, reach: float, without: float, *, steps: int) -> list[bool]:
    """Whether the drafter is left alone in each of so many steps, whose goodput without it would be `without`."""
    found = []
    for step in range(steps):
        found.append(worth.is_paused(name, step))
        worth.judge(plan(reach), TOKEN_MS, 2, step, SOURCES, lambda span, ms: without if span == SOURCES[name] else 0.0)
    return found


def test_a_drafter_without_which_the_plan_would_yield_more_is_left_alone_for_a_while() -> None:
    worth = Worth()
    worth.spent("model", 2, 2.0)
    # (2 + 0.4) tokens in 5 ms, against 0.5 per ms
    found = paused(worth, "model", 0.2, 0.5, steps=PATIENCE + FIRST_PAUSE + 1)
    assert found == [False] * PATIENCE + [True] * FIRST_PAUSE + [False]


def test_a_drafter_that_adds_to_the_plan_is_asked_on() -> None:
    worth = Worth()
    worth.spent("model", 2, 2.0)
    assert not any(paused(worth, "model", 0.9, 0.5, steps=30))


def test_what_asking_the_others_takes_is_told_to_whoever_compares() -> None:
    worth, told = Worth(), []
    worth.spent("history", 2, 0.5)
    worth.spent("model", 2, 2.0)
    worth.judge(plan(0.5), TOKEN_MS, 2, 0, SOURCES, lambda span, ms: told.append((span, ms)) or 0.0)
    assert told == [((0, 1), 2.0), ((1, 2), 0.5)]


def test_a_drafter_that_takes_next_to_nothing_is_always_asked() -> None:
    worth = Worth()
    worth.spent("history", 2, 2 * 0.9 * CHEAP * TOKEN_MS)
    assert not any(paused(worth, "history", 0.0, 9.0, steps=30))


def test_a_drafter_that_is_left_alone_costs_nothing_in_that_step() -> None:
    worth = Worth()
    worth.spent("history", 2, 0.02)
    worth.spent("model", 2, 2.0)
    paused(worth, "model", 0.0, 9.0, steps=PATIENCE)
    assert abs(worth.asking_ms(2, PATIENCE) - 0.02) < 1e-9
    assert abs(worth.asking_ms(2, PATIENCE + FIRST_PAUSE) - 2.02) < 1e-9


def test_where_it_is_not_known_what_a_token_is_worth_nobody_is_left_alone() -> None:
    worth = Worth()
    worth.spent("model", 2, 100.0)
    for step in range(30):
        worth.judge(plan(0.0), 0.0, 2, step, SOURCES, lambda span, ms: 9.0)
        assert not worth.is_paused("model", step)


def test_what_a_pass_takes_for_one_request_is_not_asked_for_each_of_many() -> None:
    """A model's pass takes most of its time whatever the batch."""
    worth = Worth()
    for _ in range(20):
        worth.spent("model", 1, 1.5)
    assert worth.asking_ms(8, 0) == 1.5
