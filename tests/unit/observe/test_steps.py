import numpy as np
import pytest

from bench.runner.switches import SwitchCounter
from tests.trees import batch_of, chain
from tests.unit.observe.engine import Rollout, record_of
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.observe.steps import _MOST_OPEN, OpenPlans, verified_by_request
from vllm_specrollout.observe.timeline import TimelineListener
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.replay.records import Header
from vllm_specrollout.types import EMPTY_TREE, StepPlan, empty_trees

ANSWERS = {"a": list(range(1, 30)), "b": list(range(50, 70))}


def plans(count):
    return [StepPlan(empty_trees(["r"]), "fixed") for _ in range(count)]


def test_a_note_is_found_by_its_own_plan_and_older_ones_go_with_it():
    open_plans, (first, second, third) = OpenPlans(), plans(3)
    for number, plan in enumerate((first, second, third)):
        open_plans.add(plan, number)
    assert open_plans.take(None) is None and open_plans.num_gone == 0
    assert open_plans.take(second) == 1
    assert open_plans.take(first) is None and open_plans.take(second) is None
    assert (open_plans.num_gone, open_plans.num_added) == (2, 3)
    assert open_plans.take_all() == [2] and open_plans.num_gone == 3


def test_plans_that_never_become_steps_do_not_pile_up():
    open_plans = OpenPlans()
    for number, plan in enumerate(plans(_MOST_OPEN + 5)):
        open_plans.add(plan, number)
    assert open_plans.take_all()[0] == 5


def test_what_was_verified_is_told_for_requests_with_a_draft_only():
    trees = batch_of([EMPTY_TREE, chain([1, 2, 3]), chain([4])], ["a", "b", "c"])
    assert verified_by_request(record_of(trees, [[], [0, 1], []])) == {"b": (3, 2), "c": (1, 0)}
    assert verified_by_request(record_of(empty_trees(["a", "b"]))) == {}


class NullSink:
    def write(self, record):
        pass

    def close(self):
        pass


class Frozen(Listener):
    """Hands on what it hears, with every array locked."""

    def __init__(self, inner):
        self.inner = inner

    def admitted(self, view):
        self.inner.admitted(view)

    def planned(self, batch, limits, proposals, plan, draft_ms):
        for one in (batch, limits, *proposals, plan, plan.trees):
            lock(one)
        self.inner.planned(batch, limits, proposals, plan, draft_ms)

    def stepped(self, record):
        for one in (record.trees, record.result):
            lock(one)
        self.inner.stepped(record)

    def finished(self, ending):
        lock(ending)
        self.inner.finished(ending)


def lock(carrier):
    for name in carrier.__slots__:
        value = getattr(carrier, name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize(
    "listener",
    [
        Metrics(("ngram",)),
        SwitchCounter(),
        TimelineListener(4, lambda: 0.0),
        Recorder(Header(max_num_seqs=2, max_draft_tokens=8, max_depth=4), NullSink(), lambda: 0.0),
    ],
    ids=lambda listener: type(listener).__name__,
)
def test_no_listener_writes_into_what_it_is_given(listener, is_late):
    alone = Rollout(ANSWERS, Listener(), is_late).run()
    assert Rollout(ANSWERS, Frozen(listener), is_late).run().nodes == alone.nodes
