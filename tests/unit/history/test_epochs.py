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
    ("events", "versions", "wanted"),
    [
        pytest.param("ABabABab", "", "2", id="side by side"),
        pytest.param("AaAaAaBbBbBb", "", "", id="a group one by one"),
        pytest.param("ABABabab", "", "", id="groups interleaved"),
        pytest.param("AaAaAaAa", "", "", id="a single problem"),
        pytest.param("AABabABb", "", "4", id="A is back but one of its requests still runs, so B decides"),
        pytest.param("ZAaBbAzBZ", "", "3", id="Z runs on into epoch 1 and comes back to it for the first time"),
        pytest.param("AaBbCcCcAaBb", "", "4", id="last in one epoch and first in the next, so one problem late"),
        pytest.param("AaBbCcAaBbCc", "111111", "", id="all second samples by the same policy"),
        pytest.param("AaBbCcAaBbCc", "111222", "3", id="all second samples by a later policy"),
    ],
)
def test_a_problem_that_comes_back_begins_an_epoch_and_samples_of_a_group_begin_none(events, versions, wanted):
    assert boundaries(events, versions) == wanted


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
