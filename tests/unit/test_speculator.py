"""The two halves of a step, with drafters of a few lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.drafters import Says, nothing_accepted, requests_of, views_of
from vllm_specrollout.budgets.base import bounded
from vllm_specrollout.budgets.fixed import FixedBudget, OffBudget
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import Answer, DraftLimits, FinishReason, RequestBatch, StepTiming, TreeBatch, empty_trees

ENDING = Answer("0", "p", np.zeros(2, np.int32), np.zeros(7, np.int32), FinishReason.FINISHED)
TIMING = StepTiming(2, 4, 2, 0, 3, 10.0, True)


def planned_tokens(speculator: Speculator, batch: RequestBatch) -> list[list[int]]:
    trees = speculator.propose(batch, 0).plan.trees
    return [trees.tree(i).token_ids.tolist() for i in range(batch.size)]


def test_branches_of_several_drafters_become_one_tree():
    speculator = Speculator([Says("a", [1, 2]), Says("b", [1, 3], source=1)], FixedBudget(8, 8))
    assert sorted(planned_tokens(speculator, requests_of(1))[0]) == [1, 2, 3]


def test_what_a_drafter_says_of_an_end_is_not_verified():
    own = ([], [2], [1, 9])
    views = [replace(view, ends=np.asarray(ends, np.int32)) for view, ends in zip(views_of(3), own, strict=True)]
    speculator = Speculator([Says("a", [1, 2, 3])], FixedBudget(8, 8))
    assert planned_tokens(speculator, RequestBatch.of(views)) == [[1, 2, 3], [1], []]


def test_nobody_is_asked_when_nothing_may_be_drafted():
    drafter = Says("a", [1])
    plan = Speculator([drafter], FixedBudget(0, 8)).propose(requests_of(1), 0).plan
    assert not drafter.asked and not plan.is_on and plan.reason == "nothing to draft"


def test_only_the_drafters_that_the_limits_name_are_asked():
    class Names(FixedBudget):
        def limits(self, batch: RequestBatch) -> DraftLimits:
            wanted = np.asarray([0b01, 0b10, 0b10], dtype=np.uint32)
            return replace(bounded(batch, 8, 8), drafters=wanted)

    drafters = [Says("a", [1]), Says("b", [2], source=1), Says("c", [3], source=2)]
    assert planned_tokens(Speculator(drafters, Names(8, 8)), requests_of(3)) == [[1], [2], [2]]
    assert [len(drafter.asked) for drafter in drafters] == [1, 1, 0]


def test_drafters_hear_of_requests_whatever_the_budget_does():
    drafter = Says("a", [1])
    speculator = Speculator([drafter], OffBudget())
    for view in views_of(3):
        speculator.admit(view)
    assert speculator.is_paused(0, 3) and drafter.admitted == ["0", "1", "2"]


def test_verdicts_and_endings_reach_every_drafter():
    drafters = [Says("a", [1]), Says("b", [2], source=1)]
    speculator = Speculator(drafters, FixedBudget(8, 8))
    planned = speculator.propose(requests_of(2), 0)
    speculator.observe(planned, planned.plan.trees, nothing_accepted(2))
    speculator.finish(ENDING)
    speculator.forget("0")
    for drafter in drafters:
        assert len(drafter.heard) == 1 and drafter.finished == [ENDING] and drafter.forgotten == ["0"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_of_a_request_that_ended_without_a_token_drafters_are_told_and_listeners_if_it_began(has_begun):
    class Counts(FixedBudget):
        def finish(self, ending):
            raise AssertionError("nothing was drafted for it")

    drafter, listener, told = Says("a", [1]), Listener(), []
    listener.finished = told.append
    speculator = Speculator([drafter], Counts(8, 8), guard=Guard(is_strict=True), listeners=[listener])
    nothing = replace(ENDING, token_ids=ENDING.token_ids[:0])
    if has_begun:
        # an engine that steps ahead knows tokens that its client no longer gets
        speculator.begin(views_of(1)[0])
    for _ in range(2):
        speculator.finish(nothing)
    assert drafter.finished == [nothing] * 2 and told == [nothing] * has_begun


def test_a_record_holds_plan_verdict_and_time_of_the_same_step():
    records, budget = [], FixedBudget(8, 8)
    budget.observe = records.append
    speculator = Speculator([Says("a", [1, 2])], budget)
    planned = [speculator.propose(requests_of(2), step) for step in range(3)]
    # two steps in flight before the first one's time is known, and one that nothing was planned for
    speculator.observe(planned[0], planned[0].plan.trees, nothing_accepted(2))
    speculator.observe(planned[1], planned[1].plan.trees, nothing_accepted(2))
    speculator.timed(TIMING)
    speculator.observe(None, empty_trees(["0", "1"]), nothing_accepted(2))
    speculator.timed(None)
    speculator.close()
    assert [record.plan for record in records] == [planned[0].plan, planned[1].plan, None]
    assert [record.timing for record in records] == [TIMING, None, None]
    assert [len(record.proposals) for record in records] == [1, 1, 0]


def test_a_fixed_budget_asks_in_every_step_whatever_comes_of_it():
    drafter = Says("a", [])
    speculator = Speculator([drafter], FixedBudget(8, 8))
    for step in range(50):
        assert not speculator.is_paused(step, 2)
        speculator.propose(requests_of(2), step)
    assert len(drafter.asked) == 50


def test_what_never_pays_is_asked_about_ever_more_seldom_and_listeners_change_nothing_of_it():
    class BacksOff(FixedBudget):
        backs_off = True

    def asked_steps(listeners):
        speculator = Speculator([Says("a", [])], BacksOff(8, 8), listeners=listeners)
        steps = []
        for step in range(200):
            if not speculator.is_paused(step, 2):
                speculator.propose(requests_of(2), step)
                steps.append(step)
        return steps

    steps = asked_steps([])
    assert np.diff(steps).tolist()[:7] == [1, 1, 1, 5, 9, 17, 33]
    assert asked_steps([Listener()]) == steps


def test_what_was_stopped_is_paused_for_good_and_says_why():
    heard, listener = [], Listener()
    listener.paused = lambda num_requests, reason: heard.append(reason)
    speculator = Speculator([Says("a", [1])], FixedBudget(8, 8), listeners=[listener])
    assert not speculator.is_paused(1, 2) and speculator.steps_off(1, 2) == 0
    speculator.stopped = "self-check"
    assert speculator.is_paused(2, 2) and speculator.steps_off(2, 2) > 1_000_000
    assert heard == ["self-check"]


def test_a_budget_that_is_off_is_never_asked_for_limits():
    class Off(OffBudget):
        def limits(self, batch):
            raise AssertionError

    speculator = Speculator([Says("a", [1])], Off())
    assert speculator.is_paused(5, 4) and speculator.steps_off(5, 4) > 1_000_000


# --- the kinds of drafter that fit the protocol ----------------------------------------------------------------------


class OnDevice(Says):
    """Leaves its trees where it made them."""

    def answer(self, batch, limits):
        trees = super().answer(batch, limits)
        names = ("node_start", "token_ids", "parents", "log_q", "source", "depth")
        return TreeBatch(trees.request_ids, *(_Column(getattr(trees, name)) for name in names))


class _Column:
    """A tensor on a device: numpy cannot read it there."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def cpu(self) -> np.ndarray:
        return self.values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> _Column:
        return _Column(self.values[rows])

    def __sub__(self, other: _Column) -> _Column:
        return _Column(self.values - other.values)


def test_a_drafter_may_leave_its_trees_on_a_device():
    assert planned_tokens(Speculator([OnDevice("device", [1, 2])], FixedBudget(8, 8)), requests_of(2)) == [[1, 2]] * 2


def test_what_is_no_answer_at_all_is_a_failure():
    class Mute(Says):
        def propose(self, batch, limits):
            return None

    with pytest.raises(TypeError, match="NoneType in the place of a TreeBatch"):
        Speculator([Mute("mute", [])], FixedBudget(8, 8), guard=Guard(is_strict=True)).propose(requests_of(1), 0)
