from bench.runner.switches import SwitchCounter
from tests.trees import batch_of, chain, limits_of
from tests.unit.observe.engine import view
from vllm_specrollout.types import EMPTY_TREE, RequestBatch, StepPlan


def plan(counter, chosen=0, *, proposed=2, is_on=True, reason="pays"):
    batch = RequestBatch.of([view("a", [1])])
    trees = batch_of([chain([7] * chosen) if chosen else EMPTY_TREE], ["a"])
    proposal = batch_of([chain([7] * proposed) if proposed else EMPTY_TREE], ["a"])
    counter.planned(batch, limits_of(1), [proposal], StepPlan(trees, reason, is_on), 0.1)


def test_steps_are_on_when_something_is_verified_and_off_otherwise():
    counter = SwitchCounter()
    plan(counter, 2)
    plan(counter, 0)
    plan(counter, 1, is_on=False)
    counter.paused(1, "off")
    plan(counter, 2)
    assert counter.start_over() == {"steps_on": 2, "steps_off": 3, "switches": 2, "mind_changes": 2}


def test_a_step_for_which_drafters_knew_nothing_counts_for_nothing():
    counter = SwitchCounter()
    plan(counter, 2)
    plan(counter, 0, proposed=0)
    plan(counter, 2)
    assert counter.start_over() == {"steps_on": 2, "steps_off": 0, "switches": 0, "mind_changes": 0}


def test_a_paused_step_counts_as_one_that_was_decided_to_be_off():
    paused, decided = SwitchCounter(), SwitchCounter()
    for _ in range(3):
        paused.paused(1, "off")
        plan(decided, 0, is_on=False, reason="off")
    counts = {"steps_on": 0, "steps_off": 3, "switches": 0, "mind_changes": 0}
    assert paused.start_over() == decided.start_over() == counts


def test_starting_over_forgets_what_the_last_step_was():
    counter = SwitchCounter()
    plan(counter, 2)
    counter.start_over()
    counter.paused(1, "off")
    assert counter.start_over() == {"steps_on": 0, "steps_off": 1, "switches": 0, "mind_changes": 0}
