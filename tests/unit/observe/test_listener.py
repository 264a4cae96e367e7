from unittest.mock import Mock

import numpy as np
import pytest

from bench.runner.switches import SwitchCounter
from tests.unit.observe.engine import Rollout
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.replay.records import Header

ANSWERS = {"a": list(range(1, 30)), "b": list(range(50, 70))}


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
        Recorder(Header(max_num_seqs=2, max_draft_tokens=8, max_depth=4), Mock(), lambda: 0.0),
    ],
    ids=lambda listener: type(listener).__name__,
)
def test_no_listener_writes_into_what_it_is_given(listener, is_late):
    alone = Rollout(ANSWERS, Listener(), is_late).run()
    assert Rollout(ANSWERS, Frozen(listener), is_late).run().nodes == alone.nodes
