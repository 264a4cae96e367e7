from dataclasses import replace

import numpy as np
import pytest

from tests.trees import batch_of, chain, limits_of, tree_of
from tests.unit.observe.engine import Rollout, ending, record_of, timing_of, view
from tests.unit.replay.builders import LINE, ListSink, header
from tests.unit.report.pages import trace_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.replay.files import ThreadSink, read_trace
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.replay.records import Arrival, Candidates, End, Step, Verified
from vllm_specrollout.replay.simulate import replay
from vllm_specrollout.types import EMPTY_TREE, FinishReason, RequestBatch, StepPlan, empty_trees

ANSWERS = {"a": list(range(1, 40)), "b": list(range(100, 120)), "c": list(range(200, 231))}
RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
# the runner, and whether a step's record comes after the plan of the next one
ORDERS = pytest.mark.parametrize(("runner", "is_late"), [("v1", True), ("v2", False), ("v2", True)])
TREE = tree_of([-1, 0, 1, 0], [4, 5, 6, 7], [0.5, 0.5, 0.5, 0.4])


class Engine:
    """Tells a recorder of steps by hand; its clock is set from outside."""

    def __init__(self, **facts):
        self.sink = ListSink()
        self.now = 0.0
        self.recorder = Recorder(header(**facts), self.sink, lambda: self.now)

    def plan(self, views, trees, *more, draft_ms=1.0, limits=None):
        batch = RequestBatch.of(views)
        proposals = [batch_of(own, batch.request_ids) for own in (trees, *more)]
        plan = StepPlan(proposals[0], "fixed")
        limits = limits_of(batch.size, 4) if limits is None else limits
        self.recorder.planned(batch, limits, proposals, plan, draft_ms)
        return plan

    def step(self, plan=None, accepted=(), **facts):
        trees = empty_trees([]) if plan is None else plan.trees
        self.recorder.stepped(record_of(trees, accepted, plan, **facts))

    def of(self, kind):
        return [record for record in self.sink.records if isinstance(record, kind)]


def recorded(runner, is_late=None, sink=None, **facts):
    """A rollout with a recorder: (the rollout, what it wrote)."""
    sink = ListSink() if sink is None else sink
    rollout = Rollout(ANSWERS, Listener(), runner == "v1" if is_late is None else is_late, **facts)
    rollout.listener = Recorder(header(batch=len(ANSWERS), runner=runner), sink, rollout.clock)
    return rollout.run(), sink


@ORDERS
@pytest.mark.parametrize("size", [(4, 3), (1, 1), (6, 3)])
def test_a_recording_replays_to_the_steps_that_were_recorded(runner, is_late, size):
    rollout, sink = recorded(runner, is_late, budget=FixedBudget(*size))
    trace = trace_of(sink)
    result = replay(trace, FixedBudget(*size), LINE)
    assert list(result.nodes) == rollout.nodes
    assert (result.drafted, result.accepted) == (sum(rollout.nodes), sum(rollout.accepted))
    assert sum(rollout.accepted) > 0


@RUNNERS
def test_a_recording_without_drafts_replays_to_as_many_steps(runner):
    rollout, sink = recorded(runner, pauses=frozenset(range(99)))
    result = replay(trace_of(sink), FixedBudget(4, 3), LINE)
    assert result.steps == len(rollout.nodes) == max(map(len, ANSWERS.values())) and result.drafted == 0


@RUNNERS
def test_a_recording_is_read_back_from_its_file(runner, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rollout, _ = recorded(runner, sink=ThreadSink(path))
    trace = read_trace(path)
    assert not trace.is_cut and len(trace.steps) == len(rollout.nodes)
    assert [trace.ends[i].token_ids for i in range(3)] == list(ANSWERS.values())
    assert list(replay(trace, FixedBudget(4, 3), LINE).nodes) == rollout.nodes


@RUNNERS
def test_each_step_has_its_verdicts_and_a_time_as_late_as_the_header_says(runner):
    rollout, sink = recorded(runner, pauses=frozenset({3, 4, 8}))
    trace = trace_of(sink)
    assert len(trace.steps) == len(rollout.nodes)
    assert [sum(v.drafted for v in step.verified) for step in trace.steps] == rollout.nodes
    assert [sum(v.accepted for v in step.verified) for step in trace.steps] == rollout.accepted
    timed = [trace.timing_of(i) for i in range(len(trace.steps) - trace.header.lag)]
    assert [timing.nodes for timing in timed] == rollout.nodes[: len(timed)]
    assert [step.at_ms for step in trace.steps] == pytest.approx([10.0 * i + 9.0 for i in range(len(trace.steps))])
    assert trace.measured_ms() == pytest.approx(10.0 * len(trace.steps))


@ORDERS
def test_drafts_stand_in_the_record_before_the_step_that_verifies_them_with_the_reason_for_them_or_for_none(
    runner, is_late
):
    rollout, sink = recorded(runner, is_late, pauses=frozenset({3, 4, 8}))
    trace = trace_of(sink)
    for i, step in enumerate(trace.steps[:-1]):
        nodes = sum(candidates.tree.size for candidates in step.candidates)
        assert nodes >= rollout.nodes[i + 1] and (nodes > 0) == (rollout.nodes[i + 1] > 0)
        is_paused = i + 1 in (3, 4, 8)
        assert (step.ask_ms, step.views > 0) == ((0.0, False) if is_paused else (1.0, True))
        assert step.reason == ("drafts do not pay" if is_paused else "fixed")
    assert [arrival.step for arrival in trace.arrivals] == [0, 0, 0]


def test_a_pause_before_a_plan_whose_step_came_is_forgotten_and_one_behind_it_is_not():
    engine = Engine()
    engine.step()
    # the step of this pause never comes: its requests have ended
    engine.recorder.paused(1, "off")
    plan = engine.plan([view("a", [3])], [TREE])
    engine.recorder.paused(1, "drafts do not pay")
    engine.step(plan, [[0]])
    engine.step()
    engine.step()
    engine.recorder.closed()
    assert [step.reason for step in engine.of(Step)] == ["fixed", "drafts do not pay", "", ""]


def test_a_record_has_the_verified_nodes_of_each_drafter():
    engine = Engine()
    mixed = [TREE, chain([4, 5], source=2)]
    plan = engine.plan([view("a", [3]), view("b", [3])], mixed)
    engine.step(plan, [[0], []])
    engine.step()
    engine.recorder.closed()
    assert [step.sources for step in engine.of(Step)] == [(), (4, 0, 2), ()]


def test_what_is_recorded_is_what_listeners_were_told():
    engine = Engine()
    engine.recorder.admitted(view("a", [10]))
    first = engine.plan([view("a", [10]), view("b", [10])], [TREE, TREE])
    engine.step(timing=timing_of(0, 12.5))
    second = engine.plan([view("a", [10, 4, 5]), view("b", [10, 11], most=4)], [TREE, chain([4])], draft_ms=2.0)
    engine.step(first, [[0], []], timing=timing_of(8, 13.5))
    engine.recorder.finished(ending("b", [10, 11], FinishReason.TRUNCATED))
    engine.plan([view("a", [10, 4, 5, 6, 7])], [EMPTY_TREE])
    engine.step(second, [[], []])
    engine.recorder.closed()
    kinds = [type(record).__name__ for record in engine.sink.records]
    assert kinds == ["Header", "Arrival", "Arrival", "Step", "End", "Step", "Step", "End"]
    assert engine.sink.is_closed
    one, two, three = engine.of(Step)
    assert one.timing is None and two.timing.step_ms == 12.5 and three.timing.step_ms == 13.5
    assert one.verified == () and two.verified == (Verified(0, 4, 1), Verified(1, 4, 0))
    assert three.verified == (Verified(0, 4, 0), Verified(1, 1, 0))
    assert [(c.request, c.position, c.tree.size) for c in two.candidates] == [(0, 3, 4), (1, 2, 1)]
    assert (two.ask_ms, two.views, three.views, three.candidates) == (2.0, 2, 1, ())
    arrivals = [(a.request, a.step, a.num_prompt_tokens, a.max_tokens) for a in engine.of(Arrival)]
    assert arrivals == [(0, 0, 10, 100), (1, 0, 10, 100)]
    ends = [(e.request, e.status, e.token_ids) for e in engine.of(End)]
    assert ends == [(1, "truncated", [10, 11]), (0, "open", [10, 4, 5, 6, 7])]


def test_candidates_are_all_that_drafters_proposed_at_their_word():
    engine = Engine()
    one, other = chain([1, 2, 3, 4], probability=0.5), chain([1, 5, 6, 7], source=1, probability=0.25)
    nothing = chain([9])
    views = [view("a", [0]), view("b", [0])]
    engine.step(engine.plan(views, [one, nothing], [other, EMPTY_TREE], limits=limits_of(2, [4, 0], 4)), [[], []])
    (candidates,) = engine.of(Step)[0].candidates
    assert isinstance(candidates, Candidates) and candidates.request == 0
    assert sorted(candidates.tree.token_ids) == [1, 2, 3, 4, 5, 6, 7]
    words = dict(zip(candidates.tree.token_ids, np.exp(candidates.tree.log_q).tolist(), strict=True))
    assert words[1] == pytest.approx(0.5, rel=1e-3) and words[6] == pytest.approx(0.25, rel=1e-3)


def test_a_request_is_recorded_although_drafting_is_paused_all_along():
    engine = Engine()
    engine.recorder.admitted(view("a", [3]))
    engine.recorder.paused(1, "off")
    engine.step()
    engine.recorder.finished(ending("a", [3, 4, 5]))
    engine.recorder.closed()
    assert [(a.request, a.max_tokens) for a in engine.of(Arrival)] == [(0, 100)]
    assert engine.of(End)[0].token_ids == [3, 4, 5]


def test_an_arrival_names_the_tokens_that_end_its_answer():
    engine = Engine()
    engine.recorder.admitted(replace(view("a", [3]), ends=np.asarray([2, 4], np.int32)))
    engine.recorder.admitted(view("b", [3]))
    assert [a.ends for a in engine.of(Arrival)] == [(2, 4), ()]


def test_a_request_that_was_never_to_be_drafted_for_leaves_no_trace():
    engine = Engine()
    engine.recorder.finished(ending("x", [1, 2]))
    engine.recorder.closed()
    assert [type(record).__name__ for record in engine.sink.records] == ["Header"]


def test_a_request_preempted_and_admitted_again_arrives_once():
    engine = Engine()
    engine.recorder.admitted(view("a", [3]))
    engine.recorder.admitted(view("a", [3, 4, 5]))
    engine.recorder.closed()
    assert len(engine.of(Arrival)) == 1 and engine.of(End)[0].token_ids == [3, 4, 5]


def test_a_name_that_is_used_again_is_a_request_of_its_own():
    engine = Engine()
    for answer in ([1, 2], [7]):
        engine.recorder.admitted(view("a", answer[:1]))
        engine.recorder.finished(ending("a", answer))
    assert [(e.request, e.token_ids) for e in engine.of(End)] == [(0, [1, 2]), (1, [7])]


def test_plans_whose_steps_never_came_are_written_when_the_engine_stops():
    engine = Engine(batch=1)
    engine.step(timing=timing_of(0, 5.0))
    engine.now = 0.010
    engine.plan([view("a", [1])], [TREE])
    engine.plan([view("a", [1, 4])], [chain([8])])
    engine.recorder.closed()
    first, second = engine.of(Step)
    assert [first.candidates[0].tree.size, second.candidates[0].tree.size] == [4, 1]
    assert second.timing.step_ms == 5.0 and second.verified == () and second.at_ms == pytest.approx(9.0)


def test_a_plan_from_before_the_recording_is_left_out():
    before, engine = Engine(), Engine()
    engine.step(before.plan([view("a", [1])], [TREE]), [[0]])
    engine.recorder.closed()
    (step,) = engine.of(Step)
    assert step.verified == () and step.candidates == ()


@RUNNERS
def test_who_comes_while_there_is_room_did_not_exist_before(runner):
    engine = Engine(batch=2, runner=runner)
    told_late = runner == "v1"
    # the V1 runner tells of a step after the next forward pass, so the first request is admitted before any record
    rooms = [1, 2] if told_late else [2, 1, 2]
    times = [1.0, 5.0] if told_late else [1.0, 4.0, 5.0]
    if not told_late:
        engine.now = times.pop(0)
        engine.step(timing=timing_of(batch=rooms.pop(0)))
    engine.recorder.admitted(view("a", [1]))
    for name, now, batch in zip("bc", times, rooms, strict=True):
        engine.now = now
        engine.step(timing=timing_of(batch=batch))
        engine.recorder.admitted(view(name, [1]))
    # b came while one of two places was empty; c took a place that was full until then
    assert [arrival.ready_ms for arrival in engine.of(Arrival)] == [0.0, 1000.0, 1000.0]


@pytest.mark.parametrize(("runner", "num_told"), [("v1", 2), ("v2", 3)])
def test_an_arrival_names_the_step_that_computed_its_prompt(runner, num_told):
    engine = Engine(runner=runner)
    for _ in range(num_told):
        engine.step()
    engine.recorder.admitted(view("a", [1]))
    assert engine.of(Arrival)[0].step == 2


def test_who_waits_for_a_place_was_there_before():
    engine = Engine(batch=2)
    engine.now = 1.0
    engine.step(timing=replace(timing_of(batch=1), waiting=1))
    engine.recorder.admitted(view("a", [1]))
    assert engine.of(Arrival)[0].ready_ms == 0.0
