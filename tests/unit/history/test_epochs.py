"""When a new epoch is guessed, and when not."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_specrollout.history.epochs import EpochGuess


def boundaries(events: str, versions: str = "") -> str:
    """Play events: `A` a request of problem A arrives, `a` its oldest running one ends. Returns the arrivals that began
    an epoch, as their indices among all arrivals."""
    guess, running, found, count = EpochGuess(), {}, [], 0
    for event in events:
        if event.islower():
            guess.ended(running[event.upper()].pop(0))
            continue
        request = f"{event}{count}"
        running.setdefault(event, []).append(request)
        if guess.arrived(event, request, int(versions[count]) if versions else None):
            found.append(str(count))
        count += 1
    return " ".join(found)


@pytest.mark.parametrize(
    "events, wanted",
    [
        ("AaBbAaBb", "2"),
        ("AaBbCcAaBbCcAaBbCc", "3 6"),
        ("ABabABab", "2"),
        ("AaBbCcCcBbAa", "4"),
    ],
    ids=["one sample each", "three epochs", "side by side", "back in another order"],
)
def test_a_problem_that_comes_back_begins_an_epoch(events, wanted):
    assert boundaries(events) == wanted


@pytest.mark.parametrize(
    "events",
    ["AAAaaaBBBbbb", "AaAaAaBbBbBb", "ABABabab", "AaAaAaAa"],
    ids=["a group at once", "a group one by one", "groups interleaved", "a single problem"],
)
def test_samples_of_one_group_begin_none(events):
    assert boundaries(events) == ""


def test_problems_back_while_the_first_one_still_runs_begin_it_all_the_same():
    # A is back but one of its requests still runs; B decides
    assert boundaries("AABabABb") == "4"


def test_a_straggler_of_the_last_epoch_has_not_been_seen_in_this_one():
    # Z runs on while A begins epoch 1; when Z comes back, it is its first time in that epoch
    assert boundaries("ZAaBbAzBZ") == "3"


def test_all_first_samples_before_all_second_ones_are_one_epoch_if_the_policy_is_the_same():
    assert boundaries("AaBbCcAaBbCc", versions="111111") == ""
    assert boundaries("AaBbCcAaBbCc", versions="111222") == "3"


def test_a_preempted_request_that_comes_back_begins_none():
    guess = EpochGuess()
    guess.arrived("A", "1")
    guess.arrived("B", "2")
    assert not guess.arrived("A", "1")
    guess.ended("1")
    assert guess.arrived("A", "3")


def test_the_end_of_a_request_that_never_arrived_is_ignored():
    guess = EpochGuess()
    guess.ended("?")
    assert not guess.is_running("?")
    assert not guess.arrived("A", "1")


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 4), st.data())
def test_whole_epochs_in_any_order_are_told_apart(num_epochs, num_problems, group, data):
    events, last = "", ""
    for _ in range(num_epochs):
        order = data.draw(st.permutations("ABCDE"[:num_problems]))
        # last in one epoch and first in the next looks like one group
        assume(order[0] != last)
        last = order[-1]
        for problem in order:
            events += problem * group + problem.lower() * group
    first_of_each = [str(epoch * num_problems * group) for epoch in range(1, num_epochs)]
    assert boundaries(events) == " ".join(first_of_each)


def test_a_problem_last_in_one_epoch_and_first_in_the_next_makes_the_boundary_one_problem_late():
    assert boundaries("AaBbCcCcAaBb") == "4"
