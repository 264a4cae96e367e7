"""What a step of the V2 runner makes of the tokens of steps before it: what is home is taken in, and no more."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.outputs import ModelRunnerOutput

from tests.integration.test_v2_host import Recorder, late, request, step
from tests.trees import batch_of, chain
from vllm_specrollout.budgets.goodput import Acceptance
from vllm_specrollout.drafters.looked_up import LateDrafts
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.types import DraftMode, StepPlan
from vllm_specrollout.worker.common import Stats
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.v2 import runner as runner_module
from vllm_specrollout.worker.v2.host import Host, StepState
from vllm_specrollout.worker.v2.lane import Home, Lane
from vllm_specrollout.worker.v2.runner import MOST_IN_FLIGHT


def nothing(*args):
    """Is done."""


# the device is never done
EVENT = SimpleNamespace(record=nothing, query=lambda: False, synchronize=lambda: pytest.fail("waited"))


class Stock:
    """Stands in for vLLM's runner."""

    def execute_model(self, output):
        self.log.append((dict(output.num_scheduled_tokens), list(output.scheduled_spec_decode_tokens)))
        batch = SimpleNamespace(req_ids=["a"], num_draft_tokens=4, num_reqs=1)
        self.execute_model_state, self.step.num_rows = SimpleNamespace(input_batch=batch), 5

    def sample_tokens(self, grammar_output):
        made = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=None)
        counts = np.array([1])
        return SimpleNamespace(
            model_runner_output=made, sampled_token_ids=np.array([[4]]), num_sampled_tokens_np=counts, get_output=dict
        )


@pytest.fixture
def runner(monkeypatch):
    made = object.__new__(type("Runner", (Lane, Stock), {}))
    made.log, made.stats, made.metrics, made.step = [], Stats(), Metrics(()), StepState()
    recorder = Recorder(chain([5, 6]))
    recorder.budget, recorder.drafters = SimpleNamespace(backs_off=False), []
    made.host, made.spec_rollout = Host(Drafting(recorder), 100), recorder
    made.shape, made._levels, made._may_skip = (DraftMode.CHAIN, ""), 0, False
    made.max_draft_tokens, made._withheld = 4, {}
    made.inputs, made.times = SimpleNamespace(clear=nothing), SimpleNamespace(begin_step=nothing, take=list)
    made.spec_config, made.drafts = SimpleNamespace(max_depth=4), SimpleNamespace(is_paused=False)
    made.req_states, made._on_device = SimpleNamespace(req_id_to_index={"a": 0}), {0}
    made._windows, made._carried, made._next_withheld, made._acceptance = {}, {}, "", Acceptance()
    made.sources = (0, 0, 1)
    made.verifier, made.adaptive_verification, made.mover = SimpleNamespace(), None, None
    made.tokens_ready, made.output_copy_stream, made._told = EVENT, None, ()
    made._during, made._history = nullcontext(), None
    monkeypatch.setattr(runner_module, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=lambda: EVENT)))
    made.host.came_home, made.host.plan = made._came_home, made._plan
    made.host.add(request())
    return made


def sent(runner, home, tokens=(7,), drafted=None):
    runner.host.sent(late(step([runner.host.get("a")], [list(tokens)], [len(tokens)]), home, drafted))


def schedule():
    return SimpleNamespace(
        num_scheduled_tokens={"a": 5},
        scheduled_spec_decode_tokens={"a": [-1] * 4},
        total_num_scheduled_tokens=5,
        preempted_req_ids=None,
        finished_req_ids=set(),
        scheduled_new_reqs=[],
    )


def test_a_step_takes_in_what_is_home_and_waits_for_nothing(runner):
    """A step that is not home fails the test by being waited for."""
    runner.drafting.look_ahead = nothing
    sent(runner, [True])
    sent(runner, [True], (8, 9), lambda: batch_of([chain([8, 3])], ["a"]))
    sent(runner, [])
    runner.execute_model(schedule())
    assert runner.log == [({"a": 5}, ["a"])] and runner.host.num_in_flight == 3, "nothing comes before the launch"
    runner.sample_tokens(None)
    a = runner.host.get("a")
    assert a.buffer[: a.length].tolist() == [1, 2, 3, 7, 8, 9]
    assert runner.host.num_in_flight == 2, "the one that was not home, and this one"
    assert (runner.stats.accepted, runner.stats.drafted) == (1, 2)


@pytest.mark.parametrize("chosen, limits", [([8, 3], {}), ([8], {"a": 1}), ([], {"a": 0})])
def test_what_comes_home_is_planned_from_in_the_same_step_and_bounds_the_room_of_later_ones(runner, chosen, limits):
    seen = []

    def look_ahead(batch, step):
        seen.append((step, [view.token_ids.tolist() for view in batch.views]))
        there = batch_of([chain([8, 3])], ["a"])
        return PlannedStep(StepPlan(batch_of([chain(chosen)], ["a"]), "recorded"), batch, [there])

    runner.drafting.look_ahead = look_ahead
    sent(runner, [True])
    runner.host.sent(late(step([runner.host.get("a")], [[8, 9]], [2], number=2), [True]))
    runner.host._in_flight[-1].drafted = lambda: batch_of([chain([8, 3])], ["a"])
    runner.execute_model(schedule())
    output = runner.sample_tokens(None).model_runner_output
    assert seen == [(2, [[1, 2, 3, 7]])], "the step with drafts, by what was known when they were verified"
    assert runner.spec_rollout.observed[-1][0].plan.trees.token_ids.tolist() == chosen
    assert output.report.limits == limits and output.report.most == 4


def test_drafters_on_the_host_are_asked_by_the_tokens_known_now_and_their_lines_go_on_from_there(runner):
    carried = []
    drafter = SimpleNamespace(propose=lambda batch, limits: batch_of([chain([5, 6])] * batch.size, batch.request_ids))
    runner.spec_rollout.drafters, runner._late = [drafter], LateDrafts()
    runner.drafts.carry = lambda rows, lines: carried.append((rows.tolist(), lines[:, :4].tolist()))
    sent(runner, [True])
    for _ in range(2):  # in the second step nothing comes home
        runner.execute_model(schedule())
        runner.sample_tokens(None)
        assert carried == [([0], [[4, 5, 6, -1]])]


def test_a_paused_step_leaves_its_room_to_the_device_and_plans_nothing(runner):
    runner.drafting.look_ahead = lambda batch, step: pytest.fail("planned")
    runner.spec_rollout.steps_off = lambda step, num_requests: 3
    runner.execute_model(schedule())
    assert runner.drafts.is_paused
    report = runner.sample_tokens(None).model_runner_output.report
    assert report.asks_at == runner.step.number + 1 + 3


def test_nobody_drafts_and_the_mirror_still_follows(runner):
    """However late the device seems to be, all but the last few steps are done by then."""
    runner.drafting.look_ahead = nothing
    for _ in range(MOST_IN_FLIGHT):
        runner.host.sent(step([runner.host.get("a")], [[7]], [1]))
        runner.host._in_flight[-1].is_home = lambda: False
    runner.execute_model(schedule())
    runner.tokens_ready = SimpleNamespace(record=nothing, query=lambda: True, synchronize=nothing)
    runner.sample_tokens(None)
    assert runner.host.num_in_flight == 2 and runner.host.get("a").length == 3 + MOST_IN_FLIGHT - 1


@pytest.mark.parametrize(
    ("kinds", "chances", "factor", "is_covered"),
    [
        ((0, 0), (0.9, 0.9), 1.0, True),
        ((0, 2), (0.9, 0.9), 1.0, False),
        ((0, 0), (0.9, 0.5), 1.0, False),
        # the model's drafts have held less often, or whoever looks up has
        ((0, 16), (0.9, 0.5), 0.4, True),
        ((0, -1), (0.9, 0.9), 1.0, False),
    ],
)
def test_a_batch_is_covered_where_a_model_would_not_be_expected_to_bring_more(
    kinds: tuple[int, int], chances: tuple[float, float], factor: float, is_covered: bool
) -> None:
    own = np.repeat(np.float32(chances), 3).reshape(2, 3)
    tokens = np.where(np.int32(kinds)[:, None] < 0, -1, np.int32([[4, 5, 6]] * 2))
    parents = np.int32([[-1, 0, 1]] * 2)
    # where nothing was drafted all words are -1, which is no chance
    bits = np.where(tokens < 0, -1, own.view(np.int32))
    words = np.concatenate([tokens, parents, bits, np.int32(kinds)[:, None]], axis=1).astype(np.int32)
    factors = np.ones((3, 10))
    factors[2] = factor
    assert Home(["a", "b"], words, np.int32([3, 3]), (0, 0, 1)).is_covered(factors, 3, 0.75) == is_covered
