"""Records become the story of each request, whichever order they come in."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import batch_of, chain, limits_of
from tests.unit.observe.engine import Rollout, ending, record_of, view
from tests.unit.observe.story import is_gapless, reasons_of, step
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.timeline import (
    MOST_RUNNING,
    Segment,
    Timeline,
    TimelineListener,
)
from vllm_specrollout.types import EMPTY_TREE, RequestBatch, StepPlan, empty_trees


def test_of_ended_requests_the_last_are_kept_up_to_their_ends():
    timeline = Timeline(keep=2)
    for name in "abc":
        timeline.add(name, name, step(1, accepted=4))
        timeline.end(name, 3)
    timeline.end("never seen", 9)
    assert [(name, own[-1].end) for name, own in timeline.segments()] == [("b", 3), ("c", 3)]


def test_requests_that_never_end_do_not_pile_up():
    timeline = Timeline(keep=1)
    for i in range(MOST_RUNNING + 5):
        timeline.add(str(i), str(i), step(1))
    names = [name for name, _ in timeline.segments()]
    assert len(names) == MOST_RUNNING and names[0] == "5"


# --- what is heard of steps ------------------------------------------------------------------------------------------


class Engine:
    """Runs requests by hand: a clock that ticks, answers that grow."""

    def __init__(self, keep=4):
        self.now = 10.0
        self.listener = TimelineListener(keep, lambda: self.now)

    def admit(self, **lengths):
        for name, length in lengths.items():
            self.listener.admitted(self.view(name, length))

    def plan(self, lengths, kept, proposed=None, asked=64, **choice):
        """Draft chains of these lengths; returns what the record of the step is made from."""
        batch = RequestBatch.of([self.view(name, length) for name, length in lengths.items()])
        proposed = kept if proposed is None else proposed
        trees, proposal = (
            batch_of([chain([7] * n) if n else EMPTY_TREE for n in sizes], batch.request_ids)
            for sizes in (kept, proposed)
        )
        plan = StepPlan(trees, choice.pop("reason", "pays"), **choice)
        self.listener.planned(batch, limits_of(batch.size, asked), [proposal], plan, 0.0)
        return plan, batch, [proposal]

    def step(self, planned, seconds=1.0, **verified):
        """The step is over: per request how many nodes were verified and how many of them accepted."""
        self.now += seconds
        self.tell(planned, **verified)

    def tell(self, planned, **verified):
        plan, batch, proposals = planned
        counts = [verified.get(view.name, (0, 0)) for view in batch.views]
        trees = batch_of([chain([7] * nodes) if nodes else EMPTY_TREE for nodes, _ in counts], batch.request_ids)
        paths = [list(range(accepted)) for _, accepted in counts]
        self.listener.stepped(record_of(trees, paths, plan, batch=batch, proposals=proposals))

    def pause(self, count, running=1, seconds=1.0):
        for _ in range(count):
            self.listener.paused(running, "drafts do not pay")
            self.now += seconds
            self.listener.stepped(record_of(empty_trees([])))

    def end(self, name, length):
        self.listener.finished(ending(f"{name}-id", [0] * length))

    def told(self):
        return dict(self.listener.segments())

    @staticmethod
    def view(name, length):
        return dataclasses.replace(view(f"{name}-id", [0] * length), name=name)


def test_a_step_is_told_with_what_was_verified_accepted_and_expected():
    engine = Engine()
    reach = np.asarray([0.9, 0.8, 0.7, 0.5, 0.3, 0.2], dtype=np.float32)
    planned = engine.plan({"a": 1}, [6], reach=reach, expected_ms=14.0, plain_ms=12.0)
    engine.step(planned, 2.0, a=(5, 3))  # the scheduler cut one node
    engine.plan({"a": 5}, [0])
    (found,) = engine.told()["a"]
    assert (found.first, found.end, found.begin_s, found.end_s) == (1, 5, 0.0, 2.0)
    assert (found.reasons, found.nodes, found.accepted) == ({"pays": 1}, 5, 3)
    assert found.expected == pytest.approx(3.4)
    assert (found.foretold, found.expected_ms, found.plain_ms, found.batch) == (1, 14.0, 12.0, 1)


def test_what_a_batch_expects_is_told_request_by_request():
    engine = Engine()
    reach = np.asarray([0.75, 0.5, 0.25], dtype=np.float32)
    engine.step(engine.plan({"a": 1, "b": 1, "c": 1}, [1, 0, 2], reach=reach), a=(1, 1), c=(2, 0))
    told = engine.told()
    assert [told[name][0].expected for name in "abc"] == [0.75, 0.0, 0.75]
    assert told["a"][0].batch == 3 and told["a"][0].foretold == 0


def test_every_request_is_told_why_it_of_all_got_nothing():
    engine = Engine()
    lengths = dict.fromkeys("abcd", 1)
    engine.step(engine.plan(lengths, [2, 0, 0, 0], [2, 2, 0, 0], asked=[4, 4, 4, 0]), a=(2, 0))
    why = {name: own[0].reasons for name, own in engine.told().items()}
    assert why == {"a": {"pays": 1}, "b": {"left out": 1}, "c": {"nothing proposed": 1}, "d": {"nothing to draft": 1}}


@pytest.mark.parametrize(
    ("choice", "kept", "reason"),
    [
        ({"reason": "off", "is_on": False}, 0, "off"),
        ({"reason": "no gain", "is_on": False}, 0, "off: no gain"),
        ({"reason": "no gain", "is_on": False}, 2, "off: no gain"),
        ({"reason": "fixed"}, 2, "fixed"),
        ({"reason": "too expensive"}, 0, "too expensive"),
    ],
    ids=["off", "off for now", "off but trying", "fixed", "on but nothing chosen"],
)
def test_a_reason_is_the_plans_own_word(choice, kept, reason):
    engine = Engine()
    engine.step(engine.plan({"a": 1}, [kept], [2], **choice))
    assert engine.told()["a"][0].reasons == {reason: 1}


def test_paused_steps_are_counted_by_the_tokens_they_yielded():
    engine = Engine()
    engine.step(engine.plan({"a": 1}, [4]), a=(4, 2))
    engine.pause(2)
    engine.plan({"a": 6}, [4])
    engine.end("a", 6)
    decided, unasked = engine.told()["a"]
    assert (decided.first, decided.end, decided.end_s, decided.reasons) == (1, 4, 1.0, {"pays": 1})
    assert (unasked.first, unasked.end, unasked.end_s, unasked.reasons) == (
        4,
        6,
        3.0,
        {"not asked: drafts do not pay": 2},
    )


def test_a_request_that_nobody_was_ever_asked_for_is_told_too():
    engine = Engine()
    engine.admit(a=1)
    engine.pause(4, running=3)
    engine.end("a", 5)
    (found,) = engine.told()["a"]
    assert (found.first, found.end, found.begin_s, found.end_s) == (1, 5, 0.0, 4.0)
    assert found.reasons == {"not asked: drafts do not pay": 4} and found.batch == 12


def test_steps_paused_before_the_first_draft_are_told():
    engine = Engine()
    engine.admit(a=1)
    engine.pause(3)
    engine.step(engine.plan({"a": 4}, [2]), a=(2, 1))
    assert [(one.first, one.end, one.reasons) for one in engine.told()["a"]] == [
        (1, 4, {"not asked: drafts do not pay": 3}),
        (4, 6, {"pays": 1}),
    ]


def test_a_step_that_never_ran_is_not_told():
    engine = Engine()
    engine.step(engine.plan({"a": 1, "b": 1}, [4, 4]), a=(4, 4), b=(4, 1))
    planned = engine.plan({"a": 6, "b": 3}, [4, 4])  # a ended with its 4th token, which nobody knows yet
    engine.end("a", 4)
    engine.step(planned)  # b is preempted
    engine.step(engine.plan({"b": 3}, [4]), b=(4, 0))
    told = engine.told()
    assert [(one.first, one.end, one.steps) for one in told["a"]] == [(1, 4, 1)]
    assert [(one.first, one.end, one.steps) for one in told["b"]] == [(1, 4, 2)]


def test_the_last_step_of_a_rollout_is_told_although_nothing_follows():
    engine = Engine()
    engine.step(engine.plan({"a": 1}, [4]), a=(4, 2))
    engine.now += 500.0
    assert [(one.first, one.end, one.accepted, one.end_s) for one in engine.told()["a"]] == [(1, 4, 2, 1.0)]


def test_a_record_that_comes_after_the_end_is_still_told():
    engine = Engine()
    first = engine.plan({"a": 1}, [4])
    second = engine.plan({"a": 5}, [4])
    engine.tell(first, a=(4, 3))
    third = engine.plan({"a": 9}, [4])
    engine.now += 2.0
    engine.end("a", 8)
    engine.tell(second, a=(4, 3))
    engine.tell(third)
    (found,) = engine.told()["a"]
    assert (found.first, found.end, found.reasons, found.nodes) == (1, 8, {"pays": 2}, 8)


def test_a_plan_from_before_anybody_listened_is_not_told():
    before, engine = Engine(), Engine()
    engine.step(before.plan({"a": 1}, [4]), a=(4, 2))
    engine.step(engine.plan({"a": 4}, [4]), a=(4, 0))
    assert [(one.first, one.end) for one in engine.told()["a"]] == [(4, 5)]


def test_requests_that_are_not_kept_do_not_wait_for_their_last_records():
    engine = Engine(keep=2)
    engine.admit(**{f"r{i}": 1 for i in range(9)})
    engine.plan({"r0": 1}, [4])  # it never becomes a step
    for i in range(9):
        engine.end(f"r{i}", 3)
    assert len(engine.listener._ends) == 2 and len(engine.listener._open) == 2
    assert list(engine.told()) == ["r7", "r8"]


def test_rows_have_the_fields_that_benchmarks_write():
    engine = Engine()
    engine.step(engine.plan({"a": 1}, [4]), a=(4, 2))
    (row,) = engine.listener.rows()
    assert row["name"] == "a"
    (stretch,) = row["stretches"]
    assert list(stretch) == [
        "first", "end", "begin_s", "end_s", "reasons", "nodes", "accepted", "expected", "foretold", "expected_ms",
        "plain_ms", "batch",
    ]  # fmt: skip
    assert Segment(**stretch).steps == 1


@given(
    st.lists(st.tuples(st.sampled_from(["plan", "pause"]), st.integers(0, 6), st.integers(0, 6)), max_size=40),
    st.booleans(),
)
def test_whatever_is_accepted_the_story_has_all_tokens_and_nodes(story, is_late):
    engine, length, nodes = Engine(), 1, 0
    engine.admit(a=length)
    late = None
    for kind, drafted, accepted in story:
        planned = None
        if kind == "pause":
            engine.listener.paused(1, "off")
        else:
            planned = engine.plan({"a": length}, [drafted], reason="pays")
        if late is not None:
            engine.tell(late[0], a=late[1])
            late = None
        engine.now += 1.0
        accepted = min(drafted, accepted)
        if planned is None:
            length += 1
            continue
        length, nodes = length + accepted + 1, nodes + drafted
        if is_late:
            late = (planned, (drafted, accepted))
        else:
            engine.tell(planned, a=(drafted, accepted))
    engine.end("a", length)
    if late is not None:
        engine.tell(late[0], a=late[1])
    found = engine.told().get("a", [])
    assert sum(one.steps for one in found) == len(story)
    assert sum(one.nodes for one in found) == nodes
    assert reasons_of(found).get("not asked: off", 0) == sum(kind == "pause" for kind, _, _ in story)
    if story:
        assert is_gapless(found) and (found[0].first, found[-1].end) == (1, length)
        assert math.isclose(found[-1].end_s, len(story))


@pytest.mark.parametrize("is_late", [True, False])
def test_both_runners_tell_the_same_story(is_late):
    answers = {"a": list(range(1, 40)), "b": list(range(100, 120))}
    rollout = Rollout(answers, Listener(), is_late, FixedBudget(4, 3), frozenset({3, 4, 7}))
    rollout.listener = TimelineListener(4, rollout.clock)
    rollout.run()
    told = dict(rollout.listener.segments())
    for name, answer in answers.items():
        found = told[name]
        assert is_gapless(found) and (found[0].first, found[-1].end) == (1, len(answer))
    assert sum(one.nodes for own in told.values() for one in own) == sum(rollout.nodes)
    assert sum(one.accepted for own in told.values() for one in own) == sum(rollout.accepted)
    assert [reasons_of(told[name])["not asked: drafts do not pay"] for name in answers] == [3, 3]
    assert told["a"][-1].end_s == pytest.approx(0.01 * (len(rollout.nodes) - 1), abs=0.0015)
