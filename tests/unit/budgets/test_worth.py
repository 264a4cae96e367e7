import numpy as np

from tests.unit.budgets.builders import chains
from vllm_specrollout.budgets.base import PATIENCE, SHARE
from vllm_specrollout.budgets.step_cost import Price
from vllm_specrollout.budgets.worth import Worth
from vllm_specrollout.types import StepPlan, empty_trees

PLAIN_MS = 4.0
BOTH = np.ones(2, np.bool_)


def plan(reach: list[float], ms: float = PLAIN_MS) -> StepPlan:
    """A plan with one node for each request, which the target walks down to so probably."""
    return StepPlan(chains(len(reach), 1), "goodput", reach=np.array(reach, np.float32), expected_ms=ms, plain_ms=4.0)


def price_of(ms: float) -> Price:
    price = Price()
    price.spent(2, ms)
    return price


def step(worth: Worth, number: int, without: list[float], brings: list[float], ms: float = 1.0) -> list[int]:
    """One step with a drafter that takes so long and, asked for a request, makes its next token so sure.

    Returns:
        the requests that it was asked for.
    """
    before = plan(without)
    wanted = worth.wanted("model", price_of(ms), before, number, np.ones(len(without), np.bool_))
    after = np.where(wanted, np.maximum(without, brings), without)
    worth.learn(plan(after.tolist(), PLAIN_MS + ms * bool(wanted.any())))
    return np.flatnonzero(wanted).tolist()


def learned(brings: float, ms: float) -> Worth:
    """After some steps with two requests, one of them drafted for by others."""
    worth = Worth()
    for number in range(PATIENCE):
        assert step(worth, number, [0.0, 0.95], [brings, brings], ms) == [0, 1] or number > 0
    return worth


def test_an_expensive_drafter_is_asked_for_those_requests_whose_next_token_is_not_known_without_it() -> None:
    worth = learned(brings=0.8, ms=0.5)
    assert step(worth, 9, [0.95, 0.0, 0.95], [0.8] * 3, 0.5) == [1]


def test_where_all_requests_have_drafts_an_expensive_drafter_is_not_asked() -> None:
    worth = learned(brings=0.8, ms=0.5)
    assert step(worth, 5, [0.95, 0.95], [0.8, 0.8], 0.5) == []


def test_tries_of_a_drafter_that_takes_more_than_it_brings_lose_a_hundredth_of_the_time() -> None:
    worth, ms = Worth(), 0.5
    asked = [number for number in range(400) if step(worth, number, [0.0, 0.0], [0.01, 0.01], ms)]
    assert asked[:PATIENCE] == list(range(PATIENCE))
    assert np.diff(asked[PATIENCE - 1 :]).tolist() == [5, 9, *[13] * (len(asked) - PATIENCE - 2)]
    assert ms < 13 * SHARE * PLAIN_MS


def test_dear_tries_are_rarer() -> None:
    tries = {}
    for ms in (0.5, 2.0):
        worth = Worth()
        tries[ms] = sum(bool(step(worth, number, [0.0, 0.0], [0.01, 0.01], ms)) for number in range(2000)) - PATIENCE
    assert 3.5 < tries[0.5] / tries[2.0] < 4.5


def test_a_price_that_first_times_raised_does_not_keep_a_drafter_from_being_tried() -> None:
    worth, price, asked = Worth(), Price(), []
    for number in range(300):
        wanted = worth.wanted("model", price, plan([0.0]), number, np.ones(1, np.bool_))
        if wanted.any():
            asked.append(number)
            price.spent(1, 8.0 if len(asked) <= PATIENCE else 0.5)
        worth.learn(plan([0.9 * wanted.any()], PLAIN_MS + price.of(1) * wanted.any()))
    assert asked[-100:] == list(range(200, 300))


def test_a_drafter_that_has_become_good_is_asked_again_after_the_next_try() -> None:
    worth = Worth()
    for number in range(60):
        step(worth, number, [0.0, 0.0], [0.05, 0.05])
    asked = [number for number in range(60, 260) if step(worth, number, [0.0, 0.0], [0.95, 0.95])]
    # what it brought of late is a mean: some tries pass until it is believed
    assert len(asked) > 20 and asked[-10:] == list(range(250, 260))


def test_a_try_that_pays_is_told_and_one_that_does_not_is_not() -> None:
    for brings, is_told in ((0.95, True), (0.0, False)):
        worth, told = Worth(), []
        for number in range(300):
            wanted = worth.wanted("model", price_of(1.0), plan([0.0, 0.0]), number, BOTH)
            is_try = bool(wanted.any()) and worth.asked["model"][3] is not None
            after = np.where(wanted, 0.0 if number < PATIENCE + 2 else brings, 0.0)
            found = worth.learn(plan(after.tolist(), PLAIN_MS + 1.0 * wanted.any()))
            assert is_try or not found
            told.append(found)
        assert any(told) is is_told


def test_later_tries_are_for_the_request_that_is_least_sure_alone() -> None:
    worth = Worth()
    asked = [step(worth, number, [0.3, 0.0, 0.2], [0.1] * 3, 3.0) for number in range(200)]
    tries = [own for own in asked if own]
    assert tries[:PATIENCE] == [[0, 1, 2]] * PATIENCE
    assert tries[PATIENCE:] == [[1]] * (len(tries) - PATIENCE) and len(tries) > PATIENCE


def test_what_verifying_its_drafts_takes_counts_too() -> None:
    def asked(verify_ms: float) -> list[int]:
        worth = Worth()
        for number in range(PATIENCE):
            worth.wanted("model", price_of(1.0), plan([0.0, 0.0]), number, BOTH)
            worth.learn(plan([0.7, 0.7], PLAIN_MS + 1.0 + 2 * verify_ms))
        return step(worth, PATIENCE, [0.0, 0.0], [0.7, 0.7])

    assert asked(0.1) == [0, 1]
    assert asked(2.0) == []


def test_of_two_expensive_drafters_the_second_is_judged_by_what_it_adds_to_the_first() -> None:
    worth, price = Worth(), price_of(0.5)
    first, second = plan([0.0, 0.0]), plan([0.8, 0.8], PLAIN_MS + 0.5)
    for number in range(PATIENCE):
        assert (
            worth.wanted("head", price, first, number, BOTH).all()
            and worth.wanted("model", price, second, number, BOTH).all()
        )
        worth.learn(plan([0.8, 0.8], PLAIN_MS + 1.0))
    assert worth.wanted("head", price, first, PATIENCE, BOTH).all()
    assert not worth.wanted("model", price, second, PATIENCE, BOTH).any()


def test_a_drafter_that_fails_when_asked_leaves_nothing_to_learn() -> None:
    worth = learned(brings=0.8, ms=0.5)
    worth.wanted("model", price_of(0.5), plan([0.0, 0.0]), 9, BOTH)
    worth.drop("model")
    assert not worth.asked
    # the next one of that name starts anew
    assert step(worth, 10, [0.95, 0.95], [0.95, 0.95]) == [0, 1]


def test_a_drafter_with_other_weights_is_asked_as_its_parent_was_and_learned_about_quickly() -> None:
    steps = []
    for is_renewed in (False, True):
        worth = Worth()
        for number in range(100):
            step(worth, number, [0.0, 0.0], [0.8, 0.8])
        if is_renewed:
            worth.renew("model")
        asked = [step(worth, number, [0.0, 0.0], [0.0, 0.0]) for number in range(100, 200)]
        assert asked[0] == [0, 1]
        steps.append(asked.count([0, 1]))
    assert steps[1] <= steps[0] / 2, "it brings nothing, and that is noticed sooner"
    worth.renew("nobody")


def test_a_parent_that_was_written_off_does_not_keep_its_child_from_being_tried() -> None:
    worth, number, asked = Worth(), 0, [0]
    while number < 400 or not asked:
        asked = step(worth, number, [0.0, 0.0], [0.0, 0.0])
        number += 1
    assert not any(step(worth, number + i, [0.0, 0.0], [0.0, 0.0]) for i in range(10))
    worth.renew("model")
    assert [step(worth, number + i, [0.0, 0.0], [0.8, 0.8]) for i in range(10, 20)] == [[0, 1]] * 10


def test_requests_that_may_have_no_draft_are_neither_asked_for_nor_tried() -> None:
    worth, may = learned(brings=0.8, ms=0.5), np.array([True, False, True])
    assert worth.wanted("model", price_of(0.5), plan([0.0, 0.0, 0.95]), 9, may).tolist() == [True, False, False]
    for number in range(10, 200):
        wanted = worth.wanted("model", price_of(9.0), plan([0.9, 0.0, 0.95]), number, may)
        assert wanted.tolist() in ([False] * 3, [True, False, False])
        worth.learn(plan([0.9, 0.0, 0.95], 13.0))
    assert not worth.wanted("model", price_of(0.5), plan([0.0, 0.0, 0.0]), 999, ~may & False).any()


def test_one_that_brings_nothing_at_all_is_not_tried_in_every_step() -> None:
    worth, asked = Worth(), []
    for number in range(100):
        if worth.wanted("model", price_of(1.0), plan([0.0, 0.0]), number, BOTH).any():
            asked.append(number)
        worth.learn(StepPlan(empty_trees(["0", "1"]), "nothing proposed", reach=np.zeros(0, np.float32)))
    assert len(asked) < PATIENCE + 8
