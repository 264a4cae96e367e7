from dataclasses import replace

import numpy as np
import pytest

from tests.unit.replay.builders import ListSink, Scripted, header, tree
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.replay.candidates import cut
from vllm_specrollout.replay.recorder import RecordingPolicy
from vllm_specrollout.replay.records import Arrival, End, Step, Verified
from vllm_specrollout.step import Speculation
from vllm_specrollout.types import Ending, Feedback, RequestView, Status, StepTiming

TIMING = StepTiming(2, 4, 2, 0, 3, 12.5, True)


class Proposes:
    """Always the same tree, within the decision, and best first."""

    name = "proposes"

    def __init__(self) -> None:
        self.most: list[int] = []

    def propose(self, views, decisions):
        self.most += [decision.max_nodes for decision in decisions]
        whole = tree([4, 5, 6, 7], [-1, 0, 1, 0])
        depths = [min(d.max_depth, v.max_new_tokens - 1) for v, d in zip(views, decisions, strict=True)]
        return [cut(whole, replace(d, max_depth=depth)) for d, depth in zip(decisions, depths, strict=True)]

    def observe(self, feedback): ...

    def finish(self, ending): ...

    def forget(self, request_id): ...


def view(name: str, generated: int, most: int = 100) -> RequestView:
    return RequestView(name, np.arange(10 + generated, dtype=np.int32), 10, most - generated, problem_id="p")


def feedback(name: str) -> Feedback:
    none = np.zeros(0, dtype=np.int32)
    return Feedback(name, 2, 1, none, none, none.astype(np.float32), np.zeros(1, dtype=np.int32), 2)


def three_steps(policy, drafter: Drafter) -> list[list[list[int]]]:
    """What is verified in three steps of two requests."""
    speculation = Speculation([drafter], policy)
    chosen = []
    speculation.settle([], None)
    chosen.append(speculation.prepare([view("a", 1), view("b", 1)]))
    speculation.settle([feedback("a")], TIMING)
    chosen.append(speculation.prepare([view("a", 3), view("b", 2, most=4)]))
    speculation.finish(Ending("b", "p", np.arange(10), np.arange(10, 12, dtype=np.int32), Status.TRUNCATED))
    speculation.settle([], TIMING)
    chosen.append(speculation.prepare([view("a", 5)]))
    return [[t.token_ids.tolist() for t in trees] for trees in chosen]


@pytest.mark.parametrize("nodes", [0, 1, 2, 8])
def test_recording_changes_neither_what_a_policy_is_told_nor_what_is_verified(nodes: int) -> None:
    alone, wrapped = Scripted(nodes, 2), Scripted(nodes, 2)
    plain, recorded = Proposes(), Proposes()
    before = three_steps(alone, plain)
    policy = RecordingPolicy(wrapped, header(), ListSink(), lambda: 0.0)
    assert three_steps(policy, recorded) == before
    assert repr(wrapped.calls) == repr(alone.calls)
    assert policy.explain() == alone.explain()
    # while drafters were asked for all that the engine allows, also for nothing
    assert set(recorded.most) == {8}


def test_what_is_recorded_is_what_the_policy_was_told() -> None:
    sink, now = ListSink(), iter(x / 1000 for x in range(1000))
    policy = RecordingPolicy(Scripted(1, 1), header(), sink, lambda: next(now))
    three_steps(policy, Proposes())
    policy.close()
    kinds = [type(record).__name__ for record in sink.records]
    assert kinds == ["Header", "Arrival", "Arrival", "Step", "End", "Step", "Step", "End"]
    assert sink.is_closed
    first, second, third = [record for record in sink.records if isinstance(record, Step)]
    assert first.timing is None and second.timing == TIMING
    assert second.verified == (Verified(0, 2, 1),)
    assert [(c.request, c.position, c.tree.size) for c in second.candidates] == [(0, 3, 4), (1, 2, 1)]
    assert third.views == 1 and third.ask_ms == pytest.approx(1.0)
    arrivals = [record for record in sink.records if isinstance(record, Arrival)]
    assert [(a.request, a.step, a.num_prompt_tokens, a.max_tokens) for a in arrivals] == [
        (0, 0, 10, 100),
        (1, 0, 10, 100),
    ]
    ends = [record for record in sink.records if isinstance(record, End)]
    assert [(e.request, e.status, e.token_ids.tolist()) for e in ends] == [
        (1, "truncated", [10, 11]),
        (0, "open", [10, 11, 12, 13, 14]),
    ]


def test_who_comes_while_there_is_room_did_not_exist_before() -> None:
    sink, now = ListSink(), iter(float(x) for x in range(1000))
    policy = RecordingPolicy(Scripted(), header(batch=2), sink, lambda: next(now))
    room = StepTiming(1, 1, 0, 0, 1, 9.0, True)
    policy.observe([], None)
    policy.decide([view("a", 1)])
    policy.observe([], room)
    policy.decide([view("a", 2), view("b", 1)])
    policy.observe([], TIMING)
    policy.decide([view("a", 3), view("c", 1)])
    ready = [record.ready_ms for record in sink.records if isinstance(record, Arrival)]
    # b came while one of two places was empty; c took a place that was full until then
    assert ready == [0.0, 1000.0, 1000.0]
