import numpy as np

from tests.unit.budgets.builders import chains
from vllm_specrollout.budgets.base import CHEAP, FIRST_PAUSE, PATIENCE, Worth
from vllm_specrollout.types import StepPlan

SOURCES = {"history": (0, 1), "model": (1, 2)}
TOKEN_MS = 2.0


def plan(reach: float, source: int) -> StepPlan:
    """Two requests with one node each."""
    trees = chains(2, 1, source=source)
    return StepPlan(trees, "goodput", reach=np.full(2, reach, np.float32))


def paused(worth: Worth, name: str, reach: float, source: int, *, steps: int) -> list[bool]:
    """Whether the drafter is left alone in each of so many steps."""
    found = []
    for step in range(steps):
        found.append(worth.is_paused(name, step))
        worth.judge(plan(reach, source), TOKEN_MS, 2, step, SOURCES)
    return found


def test_a_drafter_whose_drafts_are_worth_less_than_asking_is_left_alone_for_a_while() -> None:
    worth = Worth()
    worth.spent("model", 2, 2.0)  # 0.4 tokens are worth 0.8 ms
    found = paused(worth, "model", 0.2, 1, steps=PATIENCE + FIRST_PAUSE + 1)
    assert found == [False] * PATIENCE + [True] * FIRST_PAUSE + [False]


def test_a_drafters_alternatives_count_for_it_as_well() -> None:
    worth = Worth()
    worth.spent("model", 2, 2.0)
    assert not any(paused(worth, "model", 0.9, 2, steps=30))


def test_another_drafters_nodes_do_not_count() -> None:
    worth = Worth()
    worth.spent("model", 2, 2.0)
    assert any(paused(worth, "model", 0.9, 0, steps=30))


def test_a_drafter_that_takes_next_to_nothing_is_always_asked() -> None:
    worth = Worth()
    worth.spent("history", 2, 2 * 0.9 * CHEAP * TOKEN_MS)
    assert not any(paused(worth, "history", 0.0, 1, steps=30))


def test_a_drafter_that_is_left_alone_costs_nothing_in_that_step() -> None:
    worth = Worth()
    worth.spent("history", 2, 0.02)
    worth.spent("model", 2, 2.0)
    paused(worth, "model", 0.0, 1, steps=PATIENCE)
    assert abs(worth.asking_ms(2, PATIENCE) - 0.02) < 1e-9
    assert abs(worth.asking_ms(2, PATIENCE + FIRST_PAUSE) - 2.02) < 1e-9


def test_where_it_is_not_known_what_a_token_is_worth_nobody_is_left_alone() -> None:
    worth = Worth()
    worth.spent("model", 2, 100.0)
    for step in range(30):
        worth.judge(plan(0.0, 1), 0.0, 2, step, SOURCES)
        assert not worth.is_paused("model", step)


def test_what_a_pass_takes_for_one_request_is_not_asked_for_each_of_many() -> None:
    """A model's pass takes most of its time whatever the batch: what one request pays for, eight pay for, too."""
    worth = Worth()
    for _ in range(20):
        worth.spent("model", 1, 1.5)
    assert worth.asking_ms(8, 0) == 1.5
    assert not any(paused(worth, "model", 0.5, 1, steps=30))
