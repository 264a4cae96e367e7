"""A drafter that waits for something is late, and nobody else is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.drafters import Says, nothing_accepted, requests_of, views_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.guard import Guard
from vllm_specrollout.own_thread import MOST_WAITING, OnThread
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import FinishedRequest, FinishReason, StepTiming

ENDING = FinishedRequest("0", "p", np.zeros(2, np.int32), np.zeros(7, np.int32), FinishReason.FINISHED)
PATIENT_S = 60  # no test waits so long unless it fails


class Waits(Says):
    """Answers when it is let go, and notes what it is told in order."""

    may_block = True

    def __init__(self) -> None:
        super().__init__("waits", [1, 2, 3])
        self.go, self.is_asked = threading.Event(), threading.Event()
        self.story: list[str] = []

    def propose(self, batch, limits):
        self.is_asked.set()
        assert self.go.wait(PATIENT_S)
        self.story.append("propose")
        return super().propose(batch, limits)

    def observe(self, trees, result):
        self.story.append("observe")

    def finish(self, ending):
        self.story.append("finish")

    def forget(self, request_id):
        self.story.append(f"forget {request_id}")


@pytest.fixture
def drafter() -> Iterator[Waits]:
    drafter = Waits()
    yield drafter
    drafter.go.set()


def thread_of(speculator: Speculator) -> OnThread:
    (found,) = speculator.drafters
    assert isinstance(found, OnThread)
    return found


def settle(speculator: Speculator) -> None:
    """Wait until the drafter's thread has done all that it was told."""
    done = threading.Event()
    thread_of(speculator)._tell(done.set)
    assert done.wait(PATIENT_S)


def contained(*drafters: Says) -> Speculator:
    return Speculator(drafters, FixedBudget(8, 8), guard=Guard(is_strict=False), time_share=1.0)


def step(speculator: Speculator, number: int) -> int:
    planned = speculator.propose(requests_of(1), number)
    speculator.observe(planned, planned.plan.trees, nothing_accepted(1))
    speculator.timed(None)
    return planned.plan.trees.num_nodes


def test_steps_go_on_while_a_drafter_hangs_and_its_answer_is_used_when_it_comes(drafter: Waits) -> None:
    survivor = Says("sound", [9], source=1)
    speculator = contained(drafter, survivor)
    # each step ends while the drafter has not come back
    assert [step(speculator, number) for number in range(5)] == [1] * 5
    assert drafter.is_asked.wait(PATIENT_S) and not drafter.go.is_set() and drafter.story == []
    drafter.go.set()
    answer = speculator._late.owed[id(speculator.drafters[0])].answer
    assert answer.done.wait(PATIENT_S)  # type: ignore[attr-defined]
    assert step(speculator, 5) == 4
    assert speculator.guard.failures == {}


def test_what_happens_while_it_hangs_is_told_in_order_when_it_comes_back(drafter: Waits) -> None:
    speculator = contained(drafter)
    step(speculator, 0)
    speculator.finish(ENDING)
    speculator.forget("0")
    speculator.forget("1")
    assert drafter.story == []
    drafter.go.set()
    settle(speculator)
    assert drafter.story == ["propose", "finish", "forget 0", "forget 1"]


def test_a_drafter_may_keep_what_it_was_handed(drafter: Waits) -> None:
    """Views hold what is valid during a call only; the engine writes on meanwhile."""
    speculator, seen = contained(drafter), []
    drafter.answer = lambda batch, limits: seen.extend(batch.views) or Says.answer(drafter, batch, limits)
    drafter.admit = seen.append
    (view,) = views_of(1)
    speculator.admit(view)
    batch = requests_of(1)
    speculator.propose(batch, 0)
    view.token_ids[:] = 55
    batch.views[0].token_ids[:] = 55
    drafter.go.set()
    settle(speculator)
    assert [own.token_ids.tolist() for own in seen] == [[0, 0, 0]] * 2


def test_an_answer_is_waited_for_where_the_last_one_came_in_time(drafter: Waits) -> None:
    drafter.go.set()
    waits = iter([0.0, PATIENT_S * 1e3, PATIENT_S * 1e3])
    thread = OnThread(drafter, lambda num_requests: next(waits), clock=lambda: 0.0)
    limits = FixedBudget(8, 8).limits(requests_of(1))
    late = thread.propose(requests_of(1), limits)
    assert late.done.wait(PATIENT_S)
    for _ in range(2):
        assert thread.propose(requests_of(1), limits).num_nodes == 3
    thread.stop()


def test_one_that_was_too_slow_is_not_waited_for_the_next_time(drafter: Waits) -> None:
    drafter.go.set()
    ticks = iter([0.0, 7.0, 7.0, 7.0])
    # without a limit to the patience it would be waited for however slow it was
    thread = OnThread(drafter, lambda num_requests: 1.0, clock=lambda: next(ticks))
    limits = FixedBudget(8, 8).limits(requests_of(1))
    first = thread.propose(requests_of(1), limits)
    getattr(first, "done", drafter.go).wait(PATIENT_S)
    done = threading.Event()
    thread._tell(done.set)
    assert done.wait(PATIENT_S)
    drafter.go.clear()
    second = thread.propose(requests_of(1), limits)
    assert not second.is_ready()
    drafter.go.set()
    thread.stop()


def test_what_it_raises_is_a_failure_of_its_own_and_nothing_else(drafter: Waits) -> None:
    drafter.go.set()
    drafter.answer = lambda batch, limits: 1 / 0
    speculator = contained(drafter, Says("sound", [9], source=1))
    nodes = []
    for number in range(3):
        nodes.append(step(speculator, number))
        if len(speculator.drafters) > 1:
            done = threading.Event()
            speculator.drafters[0]._tell(done.set)
            assert done.wait(PATIENT_S)
    assert nodes == [1, 1, 1] and speculator.guard.failures == {"drafter waits": 1}
    assert [d.name for d in speculator.all_drafters()] == ["waits", "sound"]


def test_one_that_raises_at_an_ending_fails_when_it_is_called_next(drafter: Waits) -> None:
    drafter.go.set()

    def full(ending):
        raise OSError("no space left on device")

    drafter.finish = full
    speculator = contained(drafter)
    speculator.finish(ENDING)
    thread = thread_of(speculator)
    while thread._error is None:
        pass
    speculator.forget("0")
    assert speculator.drafters == [] and speculator.guard.failures == {"drafter waits": 1}


def test_the_call_at_which_an_earlier_error_shows_is_heard_as_well(drafter: Waits) -> None:
    drafter.go.set()
    drafter.rollback = lambda request_id, num_tokens: 1 / 0
    speculator = contained(drafter)
    thread = thread_of(speculator)
    thread.rollback("0", 0)
    while thread._error is None:
        pass
    speculator.finish(ENDING)
    assert speculator.drafters == []
    speculator.forget("0")
    speculator.close()
    thread._thread.join(PATIENT_S)
    # once each, and in order
    assert drafter.story == ["finish", "forget 0"]


def test_one_that_does_not_come_back_for_very_long_has_failed(drafter: Waits) -> None:
    speculator = contained(drafter)
    step(speculator, 0)
    for i in range(MOST_WAITING + 1):
        speculator.forget(str(i))
    assert speculator.drafters == [] and speculator.guard.failures == {"drafter waits": 1}
    assert speculator.health()["drafters"]["waits"]["error"].startswith("StuckError")


def test_verdicts_do_not_wait_for_one_that_is_late(drafter: Waits) -> None:
    """They are for learning, and come in every step."""
    speculator = contained(drafter, Says("sound", [9], source=1))
    for number in range(10):
        step(speculator, number)
    assert speculator.drafters[0]._calls.qsize() == 0 or not drafter.is_asked.is_set()
    drafter.go.set()
    speculator.close()


def test_a_strict_engine_waits_for_whoever_may_block(drafter: Waits) -> None:
    """What happens must not depend on the clock where tests look at it."""
    speculator = Speculator([drafter], FixedBudget(8, 8), guard=Guard(is_strict=True), time_share=1.0)
    threading.Timer(0.01, drafter.go.set).start()
    assert step(speculator, 0) == 3
    speculator.close()


def test_one_that_is_replaced_owes_nothing_any_more(drafter: Waits) -> None:
    speculator = contained(drafter)
    step(speculator, 0)
    assert speculator._late.owed
    speculator.replace_drafters([Says("sound", [9])])
    assert not speculator._late.owed and step(speculator, 1) == 1


def test_a_drafter_that_never_blocks_is_asked_where_the_engine_is() -> None:
    drafter = Says("sound", [1])
    assert contained(drafter).drafters == [drafter]


class Slow(Says):
    """Takes so many milliseconds to answer, by a clock that only it moves."""

    def __init__(self, name: str, ms: float) -> None:
        super().__init__(name, [1, 2])
        self.ms, self.now = ms, 0.0

    def propose(self, batch, limits):
        self.now += self.ms / 1e3
        return super().propose(batch, limits)


def asked_in(drafter: Slow, share: float, steps: int = 200, *, is_strict: bool = False) -> list[int]:
    """The steps in which it was asked, where the rest of a step takes 10 ms."""
    speculator = Speculator(
        [drafter],
        FixedBudget(8, 8),
        guard=Guard(is_strict=is_strict),
        time_share=share,
        clock=lambda: drafter.now,
    )
    found = []
    for number in range(steps):
        before, count = drafter.now, len(drafter.asked)
        planned = speculator.propose(requests_of(1), number)
        ask_ms = (drafter.now - before) * 1e3
        speculator.observe(planned, planned.plan.trees, nothing_accepted(1))
        speculator.timed(StepTiming(1, 1, 0, 0, 1, 10.0 + ask_ms, True, ask_ms=ask_ms))
        if len(drafter.asked) > count:
            found.append(number)
    return found


def test_a_drafter_that_keeps_within_its_share_is_asked_in_every_step() -> None:
    assert asked_in(Slow("slow", 9.9), 1.0) == list(range(200))


@pytest.mark.parametrize(("ms", "share", "every"), [(19.0, 1.0, 2), (35.0, 1.0, 4), (19.0, 0.5, 4), (50.0, 10.0, 1)])
def test_one_that_takes_more_than_its_share_is_asked_in_fewer_steps(ms: float, share: float, every: int) -> None:
    steps = asked_in(Slow("slow", ms), share)
    assert set(np.diff(steps[2:]).tolist()) == {every}
    # so that it has its share of the time, and no more
    assert len(steps) * ms <= share * 10.0 * 200 + 2 * ms


def test_one_that_hung_once_is_left_alone_for_as_long_and_then_asked_as_before() -> None:
    class Once(Slow):
        def propose(self, batch, limits):
            self.now += 0.5 if len(self.asked) == 10 else 0.0
            return super().propose(batch, limits)

    steps = asked_in(Once("once", 1.0), 1.0)
    assert steps[:11] == list(range(11)) and steps[11] - steps[10] == 51
    assert steps[11:] == list(range(steps[11], 200))


def test_no_drafter_owes_for_ever() -> None:
    class Once(Slow):
        def propose(self, batch, limits):
            self.now += 1e6 if len(self.asked) == 10 else 0.0
            return super().propose(batch, limits)

    steps = asked_in(Once("once", 1.0), 1.0, 1200)
    assert steps[11] - steps[10] <= 1026


def test_a_model_in_the_targets_own_steps_has_no_limit_nor_has_anyone_where_failures_are_raised() -> None:
    class Model(Slow):
        is_in_step = True

    assert asked_in(Model("model", 100.0), 1.0) == list(range(200))
    assert asked_in(Slow("slow", 100.0), 1.0, is_strict=True) == list(range(200))
