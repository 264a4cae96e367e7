import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.drafters import Says, nothing_accepted, requests_of, views_of
from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.fixed import FixedBudget, OffBudget
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.observe.probation import FIRST_PATIENCE, MOST_FAILURES, RECOVERED, Probation
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import Answer, FinishReason


class Faulty(Says):
    """Raises as long as it is told to, and notes when it was asked."""

    def __init__(self, source: int = 0) -> None:
        super().__init__("faulty", [1, 2], source=source)
        self.is_broken, self.steps, self.step, self.is_closed = True, list[int](), 0, threading.Event()

    def propose(self, batch: Any, limits: Any) -> Any:
        self.steps.append(self.step)
        if self.is_broken:
            raise RuntimeError("out of ideas")
        return super().propose(batch, limits)

    def close(self) -> None:
        self.is_closed.set()


def contained(*drafters: Drafter, budget: Budget | None = None, listeners: Any = ()) -> Speculator:
    return Speculator(drafters, budget or FixedBudget(8, 8), guard=Guard(is_strict=False), listeners=listeners)


def failed(**kind: Any) -> tuple[Faulty, Speculator]:
    """A drafter, such as is said, that failed in the first step, and goes on without fault."""
    drafter = Faulty()
    vars(drafter).update(kind)
    speculator = contained(drafter)
    run(speculator, range(1))
    drafter.is_broken = False
    return drafter, speculator


def state_of(speculator: Speculator, name: str) -> str:
    return speculator.health()["drafters"][name]["state"]


def run(speculator: Speculator, steps: range, before: Callable[[int], None] = lambda step: None) -> list[int]:
    """Draft nodes of each step."""
    nodes = []
    for step in steps:
        before(step)
        if speculator.is_paused(step, 1):
            nodes.append(0)
            continue
        planned = speculator.propose(requests_of(1), step)
        nodes.append(planned.plan.trees.num_nodes)
        speculator.observe(planned, planned.plan.trees, nothing_accepted(1))
        speculator.timed(None)
    return nodes


def ending(name: str) -> Answer:
    return Answer(name, "p", np.zeros(2, np.int32), np.zeros(7, np.int32), FinishReason.FINISHED)


def test_what_goes_on_failing_is_tried_four_times_as_seldom_each_time_and_then_given_up(caplog) -> None:
    drafter, metrics = Faulty(), Metrics(("faulty",))
    speculator = contained(drafter, listeners=[metrics])
    assert metrics.take()["drafters_alive/worker"] == 1
    with caplog.at_level(logging.ERROR):
        run(speculator, range(8000), lambda step: setattr(drafter, "step", step))
    assert np.diff(drafter.steps).tolist() == [1 + FIRST_PATIENCE * 4**i for i in range(MOST_FAILURES - 1)]
    assert speculator.all_drafters() == [] and drafter.is_closed.wait(20)
    counts = metrics.take()
    assert counts["failures/drafter faulty"] == MOST_FAILURES and counts["drafters_alive/worker"] == 0
    # the first and the last time are named
    first, last = [record.getMessage() for record in caplog.records]
    assert "tried again in 64 steps" in first and "given up" in last
    found = speculator.health()["drafters"]["faulty"]
    assert found == {"state": "given up", "failed": 5, "error": "RuntimeError: out of ideas", "steps": 0}


def test_what_works_again_drafts_again_in_its_own_place() -> None:
    first, second, metrics = Faulty(), Says("sound", [3], source=1), Metrics(("faulty", "sound"))
    speculator = contained(first, second, listeners=[metrics])
    nodes = run(speculator, range(100), lambda step: setattr(first, "is_broken", step < 10))
    assert nodes == [1] * 65 + [3] * 35
    assert speculator.drafters == [first, second] and metrics.take()["drafters_alive/worker"] == 2
    assert state_of(speculator, "faulty") == "alive"
    # its nodes are still counted as its own
    assert metrics.take() == {}
    run(speculator, range(100, 101))
    assert metrics.take()["nodes/verified/faulty"] == 2


def test_a_drafter_on_probation_says_so() -> None:
    speculator = contained(Faulty(), Says("sound", [3], source=1))
    run(speculator, range(5))
    health = speculator.health()
    error = "RuntimeError: out of ideas"
    assert health["drafters"]["faulty"] == {"state": "probation", "failed": 1, "error": error, "steps": 61}
    assert health["drafters"]["sound"]["state"] == health["budget"]["state"] == "alive"


def test_what_fails_once_in_a_long_while_is_never_given_up() -> None:
    drafter = Faulty()
    speculator = contained(drafter)
    for time in range(2 * MOST_FAILURES):
        begin = time * (RECOVERED + FIRST_PATIENCE + 1)
        for drafter.is_broken, step in ((True, begin), (False, begin + 1 + FIRST_PATIENCE)):
            assert run(speculator, range(step, step + 1)) == [0 if drafter.is_broken else 2]
    assert speculator.drafters == [drafter]


def test_on_probation_a_drafter_is_told_of_requests_as_before_so_nothing_is_left_behind_in_it() -> None:
    drafter = Faulty()
    speculator = contained(drafter)
    stays, goes, passes = views_of(3)
    for view in (stays, goes):
        speculator.admit(view)
    run(speculator, range(1))
    drafter.is_broken = False
    speculator.admit(passes)
    for view in (passes, goes):
        speculator.finish(ending(view.request_id))
        speculator.forget(view.request_id)
    assert drafter.admitted == ["0", "1", "2"]
    assert [e.request_id for e in drafter.finished] == drafter.forgotten == ["2", "1"]
    assert run(speculator, range(1, 66)) == [0] * 64 + [2]


def test_what_it_fails_at_being_told_on_probation_is_counted_and_does_not_prolong_it() -> None:
    class Chokes(Says):
        def finish(self, ending):
            self.finished.append(ending)
            if ending.request_id.startswith("poison"):
                raise ValueError("cannot be read")

    drafter = Chokes("chokes", [1])
    speculator = contained(drafter)
    for name in ("poison", *(f"poison{i}" for i in range(2 * MOST_FAILURES)), "sound"):
        speculator.finish(ending(name))
        speculator.forget(name)
    assert [e.request_id for e in drafter.finished][-1] == drafter.forgotten[-1] == "sound"
    assert speculator.guard.failures == {"drafter chokes": 1 + 2 * MOST_FAILURES}
    assert speculator.health()["drafters"]["chokes"]["failed"] == 1
    run(speculator, range(70))
    assert speculator.drafters == [drafter]


class Falters(FixedBudget):
    """A budget that cannot divide, as long as it is told so."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.is_broken, self.told = True, list[str]()

    def limits(self, batch):
        if self.is_broken:
            raise ZeroDivisionError
        return super().limits(batch)

    def finish(self, ending):
        self.told.append(ending.request_id)


def test_a_budget_that_fails_drafts_again_later_and_hears_of_endings_meanwhile() -> None:
    budget = Falters()
    speculator = contained(Says("a", [1, 2]), budget=budget)
    run(speculator, range(1))
    assert speculator.is_paused(1, 1) and speculator.steps_off(1, 1) == FIRST_PATIENCE
    budget.is_broken = False
    speculator.finish(ending("r"))
    assert budget.told == ["r"]
    assert run(speculator, range(1, 80)) == [0] * 64 + [2] * 15
    assert speculator.budget is budget


def test_a_model_of_the_targets_own_steps_comes_back_and_at_once_with_other_weights() -> None:
    drafter, speculator = failed(is_in_step=True)
    assert speculator.drafters == [] and speculator.all_drafters() == [drafter]
    speculator.renewed(drafter)
    assert run(speculator, range(1, 3)) == [2, 2] and speculator.probation.history(drafter) == (0, "")


def test_a_model_whose_passes_need_several_ranks_is_given_up_at_once() -> None:
    drafter, speculator = failed(is_in_step=True, is_on_ranks=True)
    assert speculator.all_drafters() == [] and drafter.is_closed.wait(20)


def test_a_drafter_whose_closing_fails_is_given_up_all_the_same(caplog) -> None:
    def stays() -> None:
        raise OSError("stale file handle")

    drafter = Faulty()
    drafter.close = stays
    speculator = contained(drafter)
    speculator.drop(drafter, RuntimeError("gone"))
    speculator.close()
    assert speculator.all_drafters() == [] and "could not be closed" in caplog.text


def test_parts_that_nobody_asks_any_more_are_forgotten() -> None:
    drafter, speculator = failed()
    speculator.replace_drafters([Says("other", [4])])
    assert run(speculator, range(1, 100))[-1] == 1 and len(drafter.steps) == 1
    assert [d.name for d in speculator.all_drafters()] == ["other"]


def test_several_that_fail_at_different_times_come_back_at_their_own() -> None:
    probation, one, other = Probation(), Says("one", []), Says("other", [])
    error = RuntimeError("no")
    assert probation.failed(one, "one", error, 10) == probation.failed(other, "other", error, 20) == FIRST_PATIENCE
    assert probation.next_due == 75 and probation.due(75) == [one]
    assert probation.next_due == 85 and probation.steps_left(other, 80) == 5 and probation.steps_left(one, 80) == 0


def test_a_drafter_that_takes_the_place_of_one_that_was_given_up_is_alive() -> None:
    drafter = Faulty()
    speculator = contained(drafter)
    speculator.drop(drafter, RuntimeError("gone"))
    assert state_of(speculator, "faulty") == "given up"
    speculator.replace_drafters([Says("faulty", [1])])
    assert state_of(speculator, "faulty") == "alive" and not speculator.probation.given_up


def test_a_budget_that_goes_on_failing_is_given_up_and_drafting_with_it_and_what_takes_its_place_is_alive() -> None:
    speculator = contained(Says("a", [1, 2]), budget=Falters())
    run(speculator, range(8000))
    assert isinstance(speculator.budget, OffBudget) and speculator.guard.failures == {"budget": MOST_FAILURES}
    assert speculator.health()["budget"]["state"] == "given up"
    speculator.budget = FixedBudget(8, 8)
    assert speculator.health()["budget"]["state"] == "alive"


def test_who_stays_when_drafters_are_replaced_stays_on_probation_and_is_told_of_requests() -> None:
    drafter, sound = Faulty(), Says("sound", [3], source=1)
    speculator = contained(drafter, sound)
    run(speculator, range(1))
    drafter.is_broken = False
    speculator.replace_drafters([drafter, Says("other", [4], source=1)])
    speculator.finish(ending("a"))
    speculator.forget("a")
    assert [d.name for d in speculator.drafters] == ["other"]
    assert state_of(speculator, "faulty") == "probation"
    assert run(speculator, range(1, 66))[-1] == 3
    assert [e.request_id for e in drafter.finished] == drafter.forgotten == ["a"]


def test_one_alone_is_replaced_and_the_others_keep_their_sources_and_their_probation() -> None:
    gone, failed, old = Faulty(), Faulty(source=1), Says("old", [1], source=2)
    gone.name = "gone"
    speculator = contained(gone, failed, old)
    run(speculator, range(1))
    speculator.drop(gone, RuntimeError("for good"))
    failed.is_broken = False
    new = Says("new", [5, 6], source=2)
    speculator.replace_one(speculator.names.index("old"), new)
    assert speculator.drafters == [new] and speculator.all_drafters() == [failed, new]
    # asked for what is wanted of its own source
    assert run(speculator, range(1, 66))[-1] == 4 and speculator.drafters == [failed, new]
    assert [state_of(speculator, name) for name in ("faulty", "new", "gone")] == ["alive", "alive", "given up"]
    speculator.replace_one(0, Says("gone", [9, 9]))
    assert [d.name for d in speculator.drafters] == ["gone", "faulty", "new"]
    assert state_of(speculator, "gone") == "alive"
