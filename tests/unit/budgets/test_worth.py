import numpy as np

from tests.unit.budgets.builders import chains
from vllm_specrollout.budgets.base import FIRST_PAUSE, LONGEST_PAUSE, PATIENCE
from vllm_specrollout.budgets.worth import CHEAP, Worth
from vllm_specrollout.types import DraftLimits, StepPlan

PLAIN_MS = 4.0


def limits(num_requests: int, token_ms: float) -> DraftLimits:
    ones = np.ones(num_requests, np.int32)
    return DraftLimits(ones, ones, ones.astype(np.bool_), token_ms=token_ms)


def plan(reach: list[float], ms: float = PLAIN_MS) -> StepPlan:
    """A plan with one node for each request, which the target walks down to so probably."""
    return StepPlan(chains(len(reach), 1), "goodput", reach=np.array(reach, np.float32), expected_ms=ms, plain_ms=4.0)


def step(worth: Worth, number: int, without: list[float], brings: list[float], ms: float = 1.0) -> list[int]:
    """One step with a drafter that takes so long and, asked for a request, makes its next token so sure.

    Returns:
        the requests that it was asked for.
    """
    worth.begin()
    before = plan(without)
    wanted = worth.wanted("model", before, number)
    if wanted.any():
        worth.spent("model", int(wanted.sum()), ms)
    after = np.where(wanted, np.maximum(without, brings), without)
    worth.learn(plan(after.tolist(), PLAIN_MS + ms * bool(wanted.any())), number)
    return np.flatnonzero(wanted).tolist()


def learned(brings: float, ms: float) -> Worth:
    """After some steps with two requests, one of them drafted for by others."""
    worth = Worth()
    worth.begin()
    worth.spent("model", 2, ms)
    for number in range(PATIENCE):
        assert step(worth, number, [0.0, 0.95], [brings, brings], ms) == [0, 1] or number > 0
    return worth


def test_a_dear_drafter_is_asked_for_those_requests_whose_next_token_is_not_known_without_it() -> None:
    worth = learned(brings=0.8, ms=0.5)
    assert step(worth, 9, [0.95, 0.0, 0.95], [0.8] * 3, 0.5) == [1]


def test_where_all_requests_have_drafts_a_dear_drafter_is_not_asked() -> None:
    worth = learned(brings=0.8, ms=0.5)
    assert step(worth, 5, [0.95, 0.95], [0.8, 0.8], 0.5) == []


def test_a_drafter_that_takes_more_than_it_brings_is_tried_ever_more_rarely() -> None:
    worth = Worth()
    worth.begin()
    worth.spent("model", 2, 3.0)
    asked = [number for number in range(400) if step(worth, number, [0.0, 0.0], [0.1, 0.1], 3.0)]
    pauses = np.diff(asked)[PATIENCE - 1 :] - 1
    assert asked[:PATIENCE] == list(range(PATIENCE))
    assert pauses[0] == FIRST_PAUSE and (np.diff(pauses) >= 0).all() and pauses[-1] == LONGEST_PAUSE


def test_a_drafter_that_has_become_good_is_asked_again_after_the_next_try() -> None:
    worth = Worth()
    worth.begin()
    worth.spent("model", 2, 1.0)
    for number in range(60):
        step(worth, number, [0.0, 0.0], [0.05, 0.05])
    asked = [number for number in range(60, 260) if step(worth, number, [0.0, 0.0], [0.95, 0.95])]
    # what it brought of late is a mean: some tries pass until it is believed
    assert len(asked) > 20 and asked[-10:] == list(range(250, 260))


def test_what_verifying_its_drafts_takes_counts_too() -> None:
    def asked(verify_ms: float) -> list[int]:
        worth = Worth()
        worth.begin()
        worth.spent("model", 2, 1.0)
        for number in range(PATIENCE):
            worth.begin()
            worth.wanted("model", plan([0.0, 0.0]), number)
            worth.spent("model", 2, 1.0)
            worth.learn(plan([0.7, 0.7], PLAIN_MS + 1.0 + 2 * verify_ms), number)
        return step(worth, PATIENCE, [0.0, 0.0], [0.7, 0.7])

    assert asked(0.1) == [0, 1]
    assert asked(2.0) == []


def test_a_drafter_that_takes_next_to_nothing_is_not_dear() -> None:
    worth = Worth()
    assert not worth.is_dear("history", limits(2, 2.0))
    for share, is_dear in ((0.9, False), (1.1, True)):
        worth.drop("history")
        worth.spent("history", 2, share * CHEAP * PLAIN_MS)
        assert worth.is_dear("history", limits(2, PLAIN_MS / 2)) is is_dear


def test_where_it_is_not_known_what_a_token_is_worth_nobody_is_dear() -> None:
    worth = Worth()
    worth.spent("model", 2, 100.0)
    assert not worth.is_dear("model", limits(2, 0.0))


def test_asking_takes_what_was_asked_in_this_step() -> None:
    worth = Worth()
    worth.spent("history", 2, 0.02)
    worth.spent("model", 2, 2.0)
    assert abs(worth.asking_ms - 2.02) < 1e-9
    worth.begin()
    worth.spent("history", 2, 0.02)
    assert abs(worth.asking_ms - 0.02) < 1e-9


def test_of_two_dear_drafters_the_second_is_judged_by_what_it_adds_to_the_first() -> None:
    worth = Worth()
    for name in ("head", "model"):
        worth.spent(name, 2, 0.5)
    for number in range(PATIENCE):
        worth.begin()
        for name, before in (("head", [0.0, 0.0]), ("model", [0.8, 0.8])):
            worth.wanted(name, plan(before, PLAIN_MS + 0.5 * (name == "model")), number)
            worth.spent(name, 2, 0.5)
        worth.learn(plan([0.8, 0.8], PLAIN_MS + 1.0), number)
    worth.begin()
    assert worth.wanted("head", plan([0.0, 0.0]), PATIENCE).all()
    assert not worth.wanted("model", plan([0.8, 0.8], PLAIN_MS + 0.5), PATIENCE).any()


def test_a_drafter_that_fails_when_asked_leaves_nothing_to_learn() -> None:
    worth = learned(brings=0.8, ms=0.5)
    worth.begin()
    worth.wanted("model", plan([0.0, 0.0]), 9)
    worth.drop("model")
    worth.learn(plan([0.0, 0.0]), 9)
    assert not worth.is_dear("model", limits(2, 1.0))
