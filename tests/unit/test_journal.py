"""Steps become stretches that lose nothing; a watched policy decides what it decides alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.journal import _MOST_RUNNING, _MOST_STRETCHES, Journal, JournaledPolicy, Stretch, condensed
from vllm_specrollout.policies.budget import FixedBudget
from vllm_specrollout.policies.off import OffBudget
from vllm_specrollout.step import Speculation
from vllm_specrollout.types import EMPTY_TREE, Choice, Ending, Feedback, RequestView, Shape, Status, chain

SUMS = ("steps", "nodes", "accepted", "expected", "foretold", "expected_ms", "plain_ms", "batch")


def step(first, reason="pays", nodes=0, accepted=0, end_s=0.0, **values):
    return Stretch(first, first + 1 + accepted, 0.0, end_s, {reason: 1}, nodes, accepted, **values)


def steps_of(reasons):
    return [step(i, reason, nodes=i % 5, expected=float(i % 3), batch=i % 4) for i, reason in enumerate(reasons)]


def totals(stretches):
    return {name: sum(getattr(one, name) for one in stretches) for name in SUMS}


def reasons_of(stretches):
    return {reason: sum(one.reasons.get(reason, 0) for one in stretches) for one in stretches for reason in one.reasons}


def written(steps, keep=4):
    journal = Journal(keep)
    for one in steps:
        journal.add("r-1", "r", one)
    ((name, stretches),) = journal.stretches()
    assert name == "r"
    return stretches


def is_gapless(stretches):
    return all(a.end == b.first for a, b in zip(stretches, stretches[1:], strict=False))


# --- stretches -------------------------------------------------------------------------------------------------------


def test_like_steps_become_one_stretch_and_a_new_reason_begins_another():
    found = written(
        [step(1, "pays", 6, 2, 1.0), step(4, "pays", 4, 1, 2.0), step(6, "off: x", end_s=3.0), step(7, "pays")]
    )
    assert [(one.first, one.end, one.reasons) for one in found] == [
        (1, 6, {"pays": 2}),
        (6, 7, {"off: x": 1}),
        (7, 8, {"pays": 1}),
    ]
    assert (found[0].nodes, found[0].accepted, found[0].end_s) == (10, 3, 2.0)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=700))
def test_a_story_of_any_length_is_kept_in_few_stretches_without_losing_a_step(reasons):
    found = written(steps_of(reasons))
    assert len(found) <= _MOST_STRETCHES
    assert totals(found) == totals(steps_of(reasons))
    assert reasons_of(found) == {reason: reasons.count(reason) for reason in reasons}
    assert is_gapless(found) and (found[0].first, found[-1].end) == (0, len(reasons))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(1, 12))
def test_condensing_keeps_every_sum_and_leaves_its_input_alone(reasons, most):
    steps = steps_of(reasons)
    found = condensed(steps, most)
    assert len(found) == min(most, len(steps))
    assert totals(found) == totals(steps) and is_gapless(found)
    assert all(one.steps == 1 for one in steps)


def test_steps_that_alternate_melt_together_and_a_phase_of_its_own_stays():
    alternating = ["pays", "nothing proposed"] * 10
    found = condensed(written(steps_of([*alternating, *["off: drafts do not pay"] * 8, *alternating])), 3)
    assert [one.reasons for one in found] == [
        {"pays": 10, "nothing proposed": 10},
        {"off: drafts do not pay": 8},
        {"pays": 10, "nothing proposed": 10},
    ]


# --- which requests are kept -----------------------------------------------------------------------------------------


def test_of_ended_requests_the_last_are_kept_and_tokens_behind_an_end_are_none_of_it():
    journal = Journal(keep=2)
    for name in "abc":
        journal.add(name, name, step(1, accepted=4))
        journal.end(name, 3)
    journal.end("never seen", 9)
    assert [(name, own[-1].end) for name, own in journal.stretches()] == [("b", 3), ("c", 3)]


def test_requests_that_never_end_do_not_pile_up():
    journal = Journal(keep=1)
    for i in range(_MOST_RUNNING + 5):
        journal.add(str(i), str(i), step(1))
    names = [name for name, _ in journal.stretches()]
    assert len(names) == _MOST_RUNNING and names[0] == "5"


# --- a watched policy ------------------------------------------------------------------------------------------------


class Proposes:
    """A drafter that proposes chains of these lengths, request by request."""

    name = "proposes"

    def __init__(self, *lengths):
        self.lengths = lengths

    def propose(self, views, decisions):
        return [chain([7] * n) for n in self.lengths[: len(views)]]

    def observe(self, feedback):
        pass

    def finish(self, ending):
        pass

    def forget(self, request_id):
        pass


class Chooses(FixedBudget):
    """Verifies what the given function keeps, and says so with the given choice."""

    def __init__(self, keep, **choice):
        super().__init__(8, 8)
        self.keep, self.values = keep, choice

    def choose(self, trees, decisions):
        chosen = self.keep(trees)
        values = {"is_on": True, "reason": "pays", "nodes": sum(tree.size for tree in chosen), **self.values}
        self._choice = Choice(**values)
        return chosen


class Engine:
    """Runs requests by hand: a clock that ticks, views that grow."""

    def __init__(self, policy, *drafters):
        self.now = 10.0
        self.policy = JournaledPolicy(policy, Journal(4), lambda: self.now)
        self.speculation = Speculation(drafters, self.policy)
        self.policy.observe([], None)  # the step that computes the prompts

    def prepare(self, **lengths):
        return self.speculation.prepare([view(name, length) for name, length in lengths.items()])

    def settle(self, seconds=1.0, **verified):
        self.now += seconds
        self.speculation.settle([feedback(name, *counts) for name, counts in verified.items()], None)

    def end(self, name, length):
        tokens = np.zeros(length, dtype=np.int32)
        self.policy.finish(Ending(f"{name}-id", "", np.zeros(4, np.int32), tokens, Status.FINISHED, name=name))

    def told(self):
        return dict(self.policy.told())


def view(name, length, shape=Shape.TREE):
    return RequestView(f"{name}-id", np.zeros(4 + length, dtype=np.int32), 4, 100, shape, name=name)


def feedback(name, drafted, accepted):
    nodes = np.arange(drafted, dtype=np.int32)
    return Feedback(
        f"{name}-id", drafted, accepted, nodes - 1, 0 * nodes, np.zeros(drafted, np.float32), nodes[:accepted]
    )


def test_a_step_is_written_with_what_was_verified_accepted_and_expected_and_when():
    engine = Engine(Chooses(list, expected_tokens=3.4, expected_ms=14.0, plain_ms=12.0), Proposes(6))
    assert [tree.size for tree in engine.prepare(a=1)] == [6]
    engine.settle(2.0, a=(5, 3))  # the scheduler cut one node
    engine.prepare(a=5)
    (found,) = engine.told()["a"]
    assert (found.first, found.end, found.begin_s, found.end_s) == (1, 5, 0.0, 2.0)
    assert (found.reasons, found.nodes, found.accepted, found.expected) == ({"pays": 1}, 5, 3, 3.4)
    assert (found.foretold, found.expected_ms, found.plain_ms, found.batch) == (1, 14.0, 12.0, 1)


def test_what_a_batch_expects_is_shared_as_the_drafters_probabilities_have_it():
    def unequal(trees):
        return [chain([7], probability=0.75), chain([7, 7], probability=0.5)]

    engine = Engine(Chooses(unequal, expected_tokens=3.0), Proposes(2, 2))
    engine.prepare(a=1, b=1)
    engine.settle(a=(1, 1), b=(2, 0))
    engine.prepare(a=3, b=2)
    told = engine.told()
    assert told["a"][0].expected == pytest.approx(1.5) and told["b"][0].expected == pytest.approx(1.5)
    assert told["a"][0].batch == 2 and told["a"][0].foretold == 0


def test_every_request_is_told_why_it_of_all_got_nothing():
    engine = Engine(Chooses(lambda trees: [trees[0], EMPTY_TREE, EMPTY_TREE, EMPTY_TREE]), Proposes(2, 2, 0, 0))
    views = [view("a", 1), view("b", 1), view("c", 1), view("d", 1, Shape.OFF)]
    engine.speculation.prepare(views)
    engine.settle(a=(2, 0))
    engine.prepare(a=2, b=2, c=2, d=2)
    why = {name: own[0].reasons for name, own in engine.told().items()}
    assert why == {"a": {"pays": 1}, "b": {"left out": 1}, "c": {"nothing proposed": 1}, "d": {"nothing to draft": 1}}


@pytest.mark.parametrize(
    ("policy", "drafters", "reason"),
    [
        (OffBudget(), [Proposes(2)], "off"),
        (Chooses(lambda trees: [EMPTY_TREE], is_on=False, reason="no gain"), [Proposes(2)], "off: no gain"),
        (FixedBudget(4, 4), [], "no drafter is left"),
        (FixedBudget(0, 0), [Proposes(2)], "nothing to draft"),
        (FixedBudget(4, 4), [Proposes(2)], "fixed"),
    ],
    ids=["off", "off for now", "no drafter", "no room", "fixed"],
)
def test_a_reason_is_the_policys_own_word_where_it_has_one(policy, drafters, reason):
    engine = Engine(policy, *drafters)
    engine.prepare(a=1)
    engine.settle()
    engine.prepare(a=2)
    assert engine.told()["a"][0].reasons == {reason: 1}


def test_steps_that_left_no_room_are_told_apart_from_the_decided_one():
    engine = Engine(FixedBudget(4, 4), Proposes(4))
    engine.prepare(a=1)
    engine.settle(1.0, a=(4, 2))
    engine.settle(1.0)
    engine.settle(1.0)
    engine.prepare(a=6)
    decided, unasked = engine.told()["a"]
    assert (decided.first, decided.end, decided.end_s, decided.reasons) == (1, 4, 1.0, {"fixed": 1})
    assert (unasked.first, unasked.end, unasked.end_s, unasked.reasons) == (4, 6, 3.0, {"not asked": 2})


def test_a_step_that_never_ran_is_not_told():
    engine = Engine(FixedBudget(4, 4), Proposes(4, 4))
    engine.prepare(a=1, b=1)
    engine.settle(a=(4, 4), b=(4, 1))
    engine.prepare(a=6, b=3)  # a has ended with its 4th token, which nobody knows yet; b is preempted
    engine.end("a", 4)
    engine.settle()
    engine.prepare(b=3)
    told = engine.told()
    assert [(one.first, one.end, one.steps) for one in told["a"]] == [(1, 4, 1)]
    assert [(one.first, one.end, one.steps) for one in told["b"]] == [(1, 3, 1)]


def test_the_last_step_of_a_rollout_is_told_although_no_view_and_no_end_follow():
    engine = Engine(FixedBudget(4, 4), Proposes(4))
    engine.prepare(a=1)
    engine.settle(a=(4, 2))
    assert [(one.first, one.end, one.accepted) for one in engine.told()["a"]] == [(1, 4, 2)]


def test_a_watched_policy_answers_and_is_asked_as_if_it_were_alone():
    alone, watched = Speculation([Proposes(9, 3)], FixedBudget(4, 4)), Engine(FixedBudget(4, 4), Proposes(9, 3))
    views = [view("a", 1), view("b", 1)]
    sizes = [[tree.size for tree in one.prepare(views)] for one in (alone, watched.speculation)]
    assert sizes[0] == sizes[1] == [4, 3]
    assert watched.policy.explain() == alone.policy.explain()
    assert watched.policy.max_nodes == 4


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=50))
def test_whatever_is_accepted_the_story_has_all_tokens_and_nodes(story):
    policy = Chooses(list)
    drafter = Proposes()
    engine, length = Engine(policy, drafter), 1
    for drafted, accepted in story:
        accepted = min(drafted, accepted)
        drafter.lengths = (drafted,)
        engine.prepare(a=length)
        engine.settle(**({"a": (drafted, accepted)} if drafted else {}))
        length += accepted + 1
    engine.end("a", length)
    found = engine.told()["a"]
    assert is_gapless(found) and (found[0].first, found[-1].end) == (1, length)
    assert sum(one.steps for one in found) == len(story)
    assert sum(one.nodes for one in found) == sum(drafted for drafted, _ in story)
    assert math.isclose(found[-1].end_s, len(story))
