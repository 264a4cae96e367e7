"""The host's side of the V2 runner: what it takes in, what it learns, and for whom it may be drafted."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trees import batch_of, chain
from vllm_specrollout.config import RequestOptions
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.types import EMPTY_TREE, DraftMode, FinishReason, StepPlan
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.request import Admission
from vllm_specrollout.worker.v2.host import Host, HostRequest, InFlight
from vllm_specrollout.worker.v2.inputs import emptied


class Recorder:
    """In place of the speculator: drafts these trees, for one request after another, and notes what it is told."""

    def __init__(self, *trees, is_strict=True):
        self.trees, self.guard = trees or (EMPTY_TREE,), Guard(is_strict=is_strict)
        self.observed, self.times, self.forgotten, self.admitted, self.begun = [], [], [], [], []
        self.finished, self.checks = [], []

    def admit(self, view):
        self.admitted.append(view.request_id)

    def begin(self, view):
        self.begun.append(view.request_id)

    def is_paused(self, step, num_requests):
        return False

    def steps_off(self, step, num_requests):
        return 0

    def propose(self, batch, step):
        trees = itertools.islice(itertools.cycle(self.trees), batch.size)
        return PlannedStep(StepPlan(batch_of([*trees], batch.request_ids), "recorded"), batch)

    def observe(self, planned, trees, result):
        self.observed.append((planned, trees, result))

    def timed(self, timing):
        self.times.append(timing)

    def forget(self, request_id):
        self.forgotten.append(request_id)

    def finish(self, ending):
        self.finished.append(ending)

    def compared(self, checked, differing):
        self.checks.append((checked, differing))


def request(name="a", shape=DraftMode.TREE, tokens=(1, 2, 3), max_tokens=10):
    return HostRequest(name, Admission(RequestOptions(), "", shape, max_tokens), len(tokens), tokens)


def step(requests, sampled, counts, trees=None, rows=1, number=0):
    home = np.asarray(sampled), np.asarray(counts)
    return InFlight(requests, batch_of(trees or [EMPTY_TREE] * len(requests)), number, lambda: home, rows, True)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def host(recorder):
    """Its clock moves by one second whenever it is looked at."""
    return Host(Drafting(recorder), 100, clock=itertools.count(0.0).__next__)


@pytest.fixture
def a(host):
    one = request()
    host.add(one)
    return one


def test_tokens_come_home_in_order_and_verdicts_are_told_from_them(recorder, host, a):
    host.sent(step([a], [[7, -1, -1]], [1]))
    host.sent(step([a], [[8, 9, 4]], [3], [chain([8, 9, 5])], rows=4))
    total = host.settle()
    assert a.buffer[: a.length].tolist() == [1, 2, 3, 7, 8, 9, 4]
    assert (total.steps, total.tokens, total.accepted) == (2, 4, 2)
    assert recorder.admitted == ["a"] and recorder.begun == ["a"], "by its first token, and once"
    (_, nothing, first), (_, trees, second) = recorder.observed
    assert nothing.num_nodes == 0 and first.num_accepted.tolist() == [0]
    assert second.accepted.tolist() == [0, 1] and trees.num_nodes == 3


def test_a_step_is_planned_for_by_its_drafts_before_its_tokens_are_taken_in(recorder, host, a):
    asked = []
    plans = {1: object(), 2: object()}

    def plan(made):
        asked.append((made.number, made.trees.num_nodes, a.length))
        return plans[made.number]

    host.plan = plan
    for number in (1, 2):
        host.sent(step([a], [[8, 9, 4]], [3], rows=4, number=number))
        host._in_flight[-1].drafted = lambda: batch_of([chain([8, 9, 5])], ["a"])
    # nothing was drafted in this one
    host.sent(step([a], [[7]], [1], number=3))
    host.settle()
    assert asked == [(1, 3, 3), (2, 3, 6)]
    assert [planned for planned, _, _ in recorder.observed] == [plans[1], plans[2], None]


def test_steps_of_different_sizes_in_one_wait_say_nothing_of_time(recorder, host, a):
    for rows in ((1,), (1, 1), (1, 4)):
        for r in rows:
            host.sent(step([a], [[7]], [1], rows=r))
        host.settle()
        host.learn()
    timings = recorder.times
    assert timings[0] is None, "nothing to measure from"
    assert timings[1] is not None and timings[1].step_ms == timings[2].step_ms > 0
    assert timings[3] is None and timings[4] is None


def test_what_steps_cost_is_told_once_and_after_all_that_a_device_waits_for(recorder, host, a):
    told = []
    for _ in range(3):
        host.sent(step([a], [[7]], [1]))
        host.settle()
        assert len(recorder.times) == len(told) < len(recorder.observed)
        told += [timing for timing in host.learn() if timing is not None] or [None]
    assert recorder.times == told and told[0] is None and told[1].context == a.length - 1
    assert host.learn() == []


def test_the_last_steps_can_be_left_in_flight(host, a):
    for _ in range(5):
        host.sent(step([a], [[7]], [1]))
    host.settle(keep=2)
    assert host.num_in_flight == 2 and a.length == 3 + 3


def late(made, home, drafted=None):
    """A step whose tokens are there once `home` is non-empty, and nobody may wait for them before."""
    wait = made.wait
    made.is_home = lambda: bool(home)
    made.wait = lambda: wait() if home else pytest.fail("waited")
    made.drafted = drafted
    return made


def test_steps_are_out_from_the_first_whose_tokens_are_not_home(host, a):
    homes = [[], [], []]
    for home in homes:
        host.sent(late(step([a], [[7]], [1]), home))
    assert host.num_out == 3
    homes[1].append(True)
    assert host.num_out == 3, "steps are taken in one after the other"
    homes[0].append(True)
    assert host.num_out == 1
    assert host.settle(host.num_out).steps == 2 and host.num_in_flight == host.num_out == 1


def test_what_the_device_drafted_is_asked_for_when_the_tokens_are_home(recorder, host, a):
    asked = []
    home = []

    def drafted():
        asked.append(bool(home))
        return batch_of([chain([8, 9, 5])], ["a"])

    host.sent(late(step([a], [[8, 9, 4]], [3], rows=4), home, drafted))
    assert host.settle(host.num_out).steps == 0 and asked == []
    home.append(True)
    total = host.settle(host.num_out)
    assert (asked, total.tokens, total.accepted, total.drafted, total.drafting) == ([True], 3, 2, 3, 1)
    ((_, trees, result),) = recorder.observed
    assert trees.token_ids.tolist() == [8, 9, 5] and result.accepted.tolist() == [0, 1]
    assert host.learn() == [] and recorder.times == [None]


def test_whoever_looks_on_is_told_of_each_step_that_came_home_before_its_requests_begin(recorder, host, a):
    told = []
    host.came_home = lambda made, result: told.append((made, a.length, list(recorder.begun)))
    sent = [step([a], [[7]], [1]), step([a], [[8, 9]], [2], [chain([8])])]
    for one in sent:
        host.sent(one)
    host.settle()
    assert told == [(sent[0], 4, []), (sent[1], 6, ["a"])] and recorder.begun == ["a"]


def test_steps_with_branches_are_counted_by_what_was_drafted(host, a):
    fork = chain([8, 9])
    fork.parents[:] = -1
    for tree, branching in ((EMPTY_TREE, 0), (chain([8, 9]), 0), (fork, 1)):
        host.sent(step([a], [[8, 4]], [1 + (tree.size > 0)], [tree]))
        total = host.settle()
        assert (total.drafting, total.branching) == (tree.size > 0, branching)


def test_only_known_requests_that_may_be_drafted_for_are_shown(host):
    for one in (request("a"), request("off", DraftMode.OFF)):
        host.add(one)
        one.append([7])
    host.add(request("in its prompt"))
    room = {"a": 2, "off": 4, "unknown": 4, "none": 0, "in its prompt": 4}
    batch = host.batch(room, may_branch=True)
    shown = [(v.request_id, v.token_ids.tolist(), v.max_new_tokens, v.max_draft_tokens) for v in batch.views]
    assert shown == [("a", [1, 2, 3, 7], 9, 2)]
    assert batch.is_chain.tolist() == [False]
    assert host.batch(room, may_branch=False).is_chain.tolist() == [True]


def test_a_request_without_drafts_has_no_room_and_one_with_a_limit_no_more(host, a):
    host.add(request("off", DraftMode.OFF))
    few = Admission(RequestOptions(max_draft_tokens=3), "", DraftMode.TREE, 10)
    host.add(HostRequest("few", few, 3, (1, 2, 3)))
    assert host.limits == {"off": 0, "few": 3}
    host.leave("off")
    assert host.limits == {"few": 3}


def test_a_request_that_is_gone_is_forgotten_but_its_tokens_on_the_way_do_no_harm(recorder, host, a):
    host.sent(step([a, None], [[7], [8]], [1, 1]))
    host.leave("a")
    host.leave("never seen")
    assert host.settle().tokens == 2 and recorder.forgotten == ["a"] and host.get("a") is None


def test_a_request_that_ends_while_it_is_preempted_is_told_with_what_it_had(recorder, host):
    names = ["aborted", "comes back"]
    for name in names:
        host.add(request(name))
    host.sent(step([host.get(name) for name in names], [[7], [8]], [1, 1]))
    for name in names:
        host.leave(name, is_preempted=True)
        host.leave(name, is_preempted=True)
    assert recorder.forgotten == names and host.get("aborted") is None
    host.settle()
    assert [ending.request_id for ending in host.unfinished()] == names
    assert host.standing() == dict.fromkeys(names, (3, 1))
    host.end("aborted", 1, FinishReason.ABORTED)
    host.leave("aborted")
    host.add(request("comes back", tokens=(1, 2, 3, 8)))
    (ending,) = recorder.finished
    assert (ending.request_id, ending.token_ids.tolist(), ending.status) == ("aborted", [7], FinishReason.ABORTED)
    assert host.unfinished() == [], "the one is over, the other one begins"
    assert list(host.standing()) == ["comes back"]


def test_an_answer_that_ended_before_new_weights_is_said_to_be_of_the_old_ones(recorder, host):
    for name in ("aborted", "goes on"):
        host.add(request(name))
    host.weights_version.close()
    host.weights_version.touch()
    # the scheduler says so with the next step, which is the first one with the new weights
    host.end("aborted", 0, FinishReason.ABORTED)
    host.weights_version.close()
    host.end("goes on", 0, FinishReason.ABORTED)
    assert [ending.weights_version for ending in recorder.finished] == [0, 1]


def test_a_schedule_without_its_room_leaves_the_schedulers_own_alone():
    schedule = SimpleNamespace(
        num_scheduled_tokens={"a": 5, "b": 5, "c": 9},
        scheduled_spec_decode_tokens={"a": [-1] * 4, "b": [-1] * 4},
        total_num_scheduled_tokens=19,
    )
    ran = emptied(schedule)
    assert ran.num_scheduled_tokens == {"a": 1, "b": 1, "c": 9} and ran.total_num_scheduled_tokens == 11
    assert ran.scheduled_spec_decode_tokens == {}
    assert schedule.num_scheduled_tokens["a"] == 5 and schedule.total_num_scheduled_tokens == 19
    assert schedule.scheduled_spec_decode_tokens.keys() == {"a", "b"}


def test_a_mistake_while_looking_ahead_costs_what_would_have_been_planned(recorder, host, a):
    recorder.trees = [chain([5, 6])]
    a.append([7])
    batch = host.batch({"a": 2}, may_branch=True)
    assert host.drafting.look_ahead(batch, 1).plan.trees.num_nodes == 2
    assert host.drafting.look_ahead(host.batch({}, may_branch=True), 1) is None
    recorder.steps_off = lambda step, num_requests: 2
    assert host.drafting.look_ahead(batch, 1) is None, "a pause was decided on while the step was under way"
    del recorder.steps_off
    recorder.guard, recorder.propose = Guard(is_strict=False), None
    assert host.drafting.look_ahead(batch, 1) is None and recorder.guard.failures == {"drafting": 1}


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_whose_end_was_told_does_not_begin_when_its_first_token_comes_home(recorder, host, a, is_preempted):
    host.sent(step([a], [[7]], [1]))
    if is_preempted:
        host.leave("a", is_preempted=True)
        host.add(request(tokens=(1, 2, 3, 7)))
    host.end("a", 0, FinishReason.ABORTED)
    if is_preempted:
        host.leave("a")
    host.settle()
    assert [ending.request_id for ending in recorder.finished] == ["a"] and recorder.begun == []


def withheld(a, row):
    """The step with the drafts of which a request got its first token alone."""
    made = step([a], [row], [1], [chain([7, 8, 5])])
    made.withheld, made.weights_version = a.request_id, 0
    return made


def test_a_withheld_path_meets_what_the_next_steps_decode_though_they_come_home_together(recorder, host, a):
    host.sent(withheld(a, [7, 8, 9, -1]))
    host.sent(step([a], [[8]], [1]))
    host.settle()
    assert a.buffer[: a.length].tolist() == [1, 2, 3, 7, 8] and recorder.checks == [(1, 0)]
    assert list(host.drafting.withheld.held) == ["a"], "nothing is drafted for it until all of it was found again"
    host.sent(step([a], [[9]], [1]))
    host.settle()
    assert recorder.checks == [(1, 0), (1, 0)] and not host.drafting.withheld.held


@pytest.mark.parametrize("what", ["another token", "nothing met", "gone", "preempted", "other weights"])
def test_a_withheld_path_is_compared_once_or_forgotten_where_it_says_nothing(recorder, host, a, what):
    host.sent(withheld(a, [7, -1, -1, -1] if what == "nothing met" else [7, 8, 9, -1]))
    if what in ("gone", "preempted"):
        host.leave("a", is_preempted=what == "preempted")
    if what == "other weights":
        host.weights_version.touch()
    host.sent(step([a], [[4]], [1]))
    host.settle()
    assert recorder.checks == ([(1, 1)] if what == "another token" else []) and not host.drafting.withheld.held
