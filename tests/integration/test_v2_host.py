"""The host's side of the V2 runner: what it waits for, what it learns, what it asks to be drafted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_specrollout.config import RequestOptions
from vllm_specrollout.guard import Guard
from vllm_specrollout.types import EMPTY_TREE, Shape, chain
from vllm_specrollout.worker.admission import Admission
from vllm_specrollout.worker.v2.host import Host, HostRequest, InFlight
from vllm_specrollout.worker.v2.inputs import filled

pytestmark = pytest.mark.vllm


class Recorder:
    """In place of drafters and policy: drafts `tree` for everyone, and notes what it is told."""

    def __init__(self, tree=EMPTY_TREE):
        self.tree, self.settled, self.forgotten, self.views = tree, [], [], []
        self.guard = Guard(is_strict=True)

    def rests(self, batch):
        return False

    def prepare(self, views):
        self.views = [(v.request_id, v.token_ids.tolist(), v.max_new_tokens, v.max_draft_tokens) for v in views]
        return [self.tree] * len(views)

    def settle(self, feedback, timing):
        self.settled.append((feedback, timing))

    def forget(self, request_id):
        self.forgotten.append(request_id)


def request(name="a", shape=Shape.TREE, tokens=(1, 2, 3), max_tokens=10):
    return HostRequest.starting_with(name, Admission(RequestOptions(), "", shape, max_tokens), len(tokens), tokens)


def step(requests, sampled, counts, trees=None, rows=1):
    home = np.asarray(sampled), np.asarray(counts)
    return InFlight(requests, trees or [EMPTY_TREE] * len(requests), lambda: home, rows, True)


@pytest.fixture
def ticking():
    """A clock that moves by one second whenever it is looked at."""
    now = iter(range(10_000))
    return lambda: float(next(now))


def test_tokens_come_home_in_order_and_verdicts_are_told_from_them(ticking):
    recorder = Recorder()
    host, a = Host(recorder, 100, clock=ticking), request()
    host.add(a)
    host.sent(step([a], [[7, -1, -1]], [1]))
    host.sent(step([a], [[8, 9, 4]], [3], [chain([8, 9, 5])], rows=4))
    total = host.settle()
    assert a.buffer[: a.length].tolist() == [1, 2, 3, 7, 8, 9, 4]
    assert (total.steps, total.tokens, total.accepted) == (2, 4, 2)
    (first, _), (second, _) = recorder.settled
    assert first == [] and second[0].accepted_nodes.tolist() == [0, 1] and second[0].drafted == 3


def test_steps_of_different_sizes_in_one_wait_say_nothing_of_time(ticking):
    recorder = Recorder()
    host, a = Host(recorder, 100, clock=ticking), request()
    for rows in ((1,), (1, 1), (1, 4)):
        for r in rows:
            host.sent(step([a], [[7]], [1], rows=r))
        host.settle()
    timings = [timing for _, timing in recorder.settled]
    assert timings[0] is None, "nothing to measure from"
    assert timings[1] is not None and timings[1].step_ms == timings[2].step_ms > 0
    assert timings[3] is None and timings[4] is None


def test_the_last_steps_can_be_left_in_flight(ticking):
    host, a = Host(Recorder(), 100, clock=ticking), request()
    for _ in range(5):
        host.sent(step([a], [[7]], [1]))
    host.settle(keep=2)
    assert host.num_in_flight == 2 and a.length == 3 + 3


def test_only_known_requests_that_may_be_drafted_for_are_asked_about(ticking):
    recorder = Recorder(chain([5, 6, 7]))
    host = Host(recorder, 100, clock=ticking)
    host.add(request("a"))
    host.add(request("off", Shape.OFF))
    drafted = host.draft({"a": 2, "off": 4, "unknown": 4, "none": 0}, may_branch=True, num_ranks=1, is_resting=False)
    assert recorder.views == [("a", [1, 2, 3], 10, 2)]
    assert drafted["a"].token_ids.tolist() == [5, 6], "no more than there is room"


def test_a_request_that_is_gone_is_forgotten_but_its_tokens_on_the_way_do_no_harm(ticking):
    recorder = Recorder()
    host, a = Host(recorder, 100, clock=ticking), request()
    host.add(a)
    host.sent(step([a, None], [[7], [8]], [1, 1]))
    host.forget("a")
    host.forget("never seen")
    assert host.settle().tokens == 2 and recorder.forgotten == ["a"] and host.get("a") is None


def test_room_that_stays_empty_is_not_run_and_the_schedule_itself_is_left_alone():
    schedule = SimpleNamespace(
        num_scheduled_tokens={"a": 5, "b": 5, "c": 9},
        scheduled_spec_decode_tokens={"a": [-1] * 4, "b": [-1] * 4},
        total_num_scheduled_tokens=19,
    )
    ran = filled(schedule, {"a": chain([5, 6])})
    assert ran.num_scheduled_tokens == {"a": 3, "b": 1, "c": 9} and ran.total_num_scheduled_tokens == 13
    assert ran.scheduled_spec_decode_tokens == {"a": [5, 6]}
    assert schedule.num_scheduled_tokens["a"] == 5 and schedule.total_num_scheduled_tokens == 19


def test_a_mistake_while_drafting_costs_the_drafts_of_the_step(ticking):
    recorder = Recorder(chain([5, 6]))
    recorder.guard, recorder.prepare = Guard(is_strict=False), None
    host = Host(recorder, 100, clock=ticking)
    host.add(request("a"))
    assert host.draft({"a": 2}, may_branch=True, num_ranks=1, is_resting=False) == {}
    assert recorder.guard.failures == {"drafting": 1}


def test_nobody_is_asked_in_a_step_that_is_rested_through(ticking):
    recorder = Recorder(chain([5, 6]))
    host = Host(recorder, 100, clock=ticking)
    host.add(request("a"))
    assert host.draft({"a": 2}, may_branch=True, num_ranks=1, is_resting=True) == {} and recorder.views == []
