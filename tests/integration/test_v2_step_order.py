"""What a step of the V2 runner does before it waits for tokens, and what after: a GPU idles for the latter."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.integration.test_v2_host import Recorder, request, step
from tests.trees import chain
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.v2.host import Host, StepState
from vllm_specrollout.worker.v2.runner import SpecRolloutV2


class Stock:
    """Stands in for vLLM's runner."""

    def update_requests(self, output):
        self.log.append("requests go on")

    def execute_model(self, output):
        self.update_requests(output)
        self.log.append(("launched", output.num_scheduled_tokens, output.scheduled_spec_decode_tokens))


def _runner(in_flight):
    runner = object.__new__(type("Runner", (SpecRolloutV2, Stock), {}))
    log, nothing = [], lambda *args: None
    runner.log, runner.stats, runner.metrics, runner.step = log, Stats(), Metrics(()), StepState()
    runner.host = Host(Drafting(Recorder(chain([5, 6]))), 100)
    runner.shape, runner.inputs = (DraftMode.TREE, ""), SimpleNamespace(clear=nothing, expect=nothing)
    runner.times = SimpleNamespace(begin_step=nothing, take=list)
    runner.draft_graphs = SimpleNamespace(chosen_from=lambda runner: nullcontext())
    runner.block_tables = SimpleNamespace(apply_staged_writes=lambda: log.append("tables are told"))
    runner.host.drafting.speculator.is_paused = lambda step, num_requests: False
    a = request()
    runner.host.add(a)
    if in_flight:
        sent = step([a], [[7]], [1])
        home = sent.wait()
        sent.wait = lambda: log.append("waited") or home
        runner.host.sent(sent)
    return runner


def _schedule():
    return SimpleNamespace(
        num_scheduled_tokens={"a": 5},
        scheduled_spec_decode_tokens={"a": [-1] * 4},
        total_num_scheduled_tokens=5,
        preempted_req_ids=None,
        finished_req_ids=set(),
        scheduled_new_reqs=[],
    )


def test_only_what_needs_the_tokens_comes_after_the_wait_for_them():
    runner, schedule = _runner(in_flight=True), _schedule()
    runner.execute_model(schedule)
    assert runner.log == ["requests go on", "tables are told", "waited", ("launched", {"a": 3}, {"a": [5, 6]})]
    assert schedule.num_scheduled_tokens == {"a": 5}, "the scheduler's own is left alone"
    assert runner.stats.by_part.keys() == {"wait", "draft", "idle"} and runner.stats.by_part["idle"][0] == 1
    speculator = runner.host.drafting.speculator
    assert len(speculator.observed) == 1 and not speculator.times, "what it cost is learned from after the launch"


def test_tables_are_told_twice_in_no_step_that_waits_for_nothing():
    """Host buffers turn with it, and the device may read the one before last as long as nobody has waited."""
    runner = _runner(in_flight=False)
    runner.execute_model(_schedule())
    assert runner.log == ["requests go on", ("launched", {"a": 3}, {"a": [5, 6]})]
    assert runner.stats.by_part.keys() == {"draft"}


def test_a_paused_step_waits_for_nothing_and_drafts_nothing():
    runner = _runner(in_flight=True)
    runner.host.drafting.speculator.is_paused = lambda step, num_requests: True
    runner.execute_model(_schedule())
    assert runner.log == ["requests go on", ("launched", {"a": 1}, {})] and not runner.stats.by_part
