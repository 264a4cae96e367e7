"""Algorithm 2 on requests that run: who gets a plan, what is learned of times, when plans are made, and who hears."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.drafters import nothing_accepted
from tests.reference import decoupled_rates as naive
from tests.reference.decoupled import VOCABULARY, Wire, sampling
from vllm_specrollout.cluster.link import Beat, Link, MatchCounts, OwnPlan
from vllm_specrollout.cluster.messages import VERSION, Hello, Told, ints
from vllm_specrollout.cluster.profiles import DrafterProfile, Learning
from vllm_specrollout.cluster.rates import AffineTime, Mode, coupled_rate, printed_rate
from vllm_specrollout.cluster.reconfigure import Group, Replanning, reconfigure
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.types import (
    DraftLimits,
    RequestBatch,
    RequestView,
    StepRecord,
    StepTiming,
    empty_trees,
)

GROUP = Group(AffineTime(0.002, 1.0), AffineTime(0.05, 12.0, 0.05), 8)
BEAT = Beat(busy_ms=900.0, passes=100, streams=1600)


def counts(*rates: float, tried: int = 400) -> MatchCounts:
    matched = np.rint(np.asarray(rates) * tried).astype(np.int32)
    return MatchCounts(tuple(f"r{i}" for i in range(len(rates))), np.full(len(rates), tried, np.int32), matched)


def test_only_requests_far_below_the_batch_get_a_plan() -> None:
    assert set(reconfigure(GROUP, counts(*[0.8] * 15, 0.3))) == {"r15"}


def test_of_equal_requests_few_get_a_plan() -> None:
    """Two standard errors: about one in 44, where half are below the average."""
    matched = np.random.default_rng(0).binomial(200, 0.7, 1000).astype(np.int32)
    equal = MatchCounts(tuple(map(str, range(1000))), np.full(1000, 200, np.int32), matched)
    assert 10 <= len(reconfigure(GROUP, equal)) <= 40


def test_few_trials_prove_nothing() -> None:
    few = MatchCounts(("a", "b"), np.asarray([1000, 2], np.int32), np.asarray([700, 0], np.int32))
    assert reconfigure(GROUP, few) == {}
    assert reconfigure(GROUP, counts(0.0, 0.0, tried=0)) == {}


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_the_printed_form_lets_the_worst_draft_as_if_alone(batch: int) -> None:
    """Whatever the batch; in the present batch they draft less the larger it is."""
    mixed = counts(*[0.8] * (batch - 1), 0.4)
    printed = reconfigure(GROUP, mixed, printed=True)[f"r{batch - 1}"]
    alone = [
        (rate(GROUP.draft, GROUP.verify, 1, window, 0.4), OwnPlan(window, mode))
        for mode, rate in ((Mode.COUPLED, coupled_rate), (Mode.DECOUPLED, printed_rate))
        for window in range(1, 17)
    ]
    assert printed == max(alone, key=lambda choice: choice[0])[1]


def test_own_windows_shrink_with_the_batch() -> None:
    windows = [reconfigure(GROUP, counts(*[0.8] * (n - 1), 0.4))[f"r{n - 1}"].window for n in (2, 8, 32, 128)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] > windows[-1]


def simulated(plans: dict[str, OwnPlan], rates: list[float], group: Group) -> float:
    """All requests' tokens per millisecond, event by event."""
    requests = []
    for i, p in enumerate(rates):
        plan = plans.get(f"r{i}", OwnPlan(group.window, Mode.DECOUPLED))
        requests.append(naive.Request(plan.window, p, plan.mode is Mode.DECOUPLED))
    return naive.never_waiting(group.draft, group.verify, requests, steps=4000, seed=3)


def test_own_plans_make_a_large_batch_faster_and_printed_ones_less_so() -> None:
    group = Group(AffineTime(0.0, 1.0), AffineTime(0.2, 12.0, 0.3), 3)
    rates = [0.8] * 48 + [0.5] * 16
    own = reconfigure(group, counts(*rates))
    printed = reconfigure(group, counts(*rates), printed=True)
    assert set(own) == set(printed) == {f"r{i}" for i in range(48, 64)}
    same, better, as_printed = (simulated(plans, rates, group) for plans in ({}, own, printed))
    assert better > 1.02 * same
    assert better > 1.005 * as_printed


def test_alone_a_request_is_its_own_batch() -> None:
    assert reconfigure(GROUP, counts(0.1)) == {}


class Engine:
    """Sixteen requests, the last of which is drafted badly for, and a drafter elsewhere."""

    def __init__(self, every: int = 1000, printed: bool = False) -> None:
        self.wire = Wire(random.Random(1))
        self.drafter = DecoupledDrafter(
            sampling, 0, vocab_size=VOCABULARY, window=8, connect=lambda address: self.wire.box("one")
        )
        self.drafter.attach("one", "one")
        self.rates = {str(i): 0.9 if i < 15 else 0.2 for i in range(16)}
        self.link.match_counts = self.match_counts  # type: ignore[method-assign]
        (name,) = {name for name, _ in self.wire.receive()}
        self.wire.send(name, Hello(VERSION, VOCABULARY, "small", "cpu: a core"))
        self.tokens = {name: [1, 2, 3] for name in self.rates}
        self.kept: list[DrafterProfile] = []
        self.learning = Learning(self.drafter, self.kept.append)
        self.replanning = Replanning(self.drafter, self.learning, every=every, printed=printed)
        self.heard()

    @property
    def link(self) -> Link:
        return self.drafter.links["one"]

    @property
    def plans(self) -> dict[str, OwnPlan]:
        return dict(self.link.plans)

    def match_counts(self) -> MatchCounts:
        """Of 400 drafted tokens of each request so many were the target's."""
        matched = np.array([round(400 * rate) for rate in self.rates.values()], np.int32)
        return MatchCounts(tuple(self.rates), np.full(16, 400, np.int32), matched)

    def heard(self) -> Told:
        """What the drafter is told in a step of the engine."""
        views = [RequestView(name, np.asarray(tokens, np.int32), 3, 200) for name, tokens in self.tokens.items()]
        batch = RequestBatch.of(views)
        self.drafter.propose(batch, DraftLimits(batch.max_nodes, batch.max_depth, batch.is_chain))
        for tokens in self.tokens.values():
            tokens.append(1)
        (told,) = [message for _, message in self.wire.receive() if isinstance(message, Told)]
        return told

    def step(self, tokens: int = 40, *, nodes: int = 32, is_decode_only: bool = True) -> None:
        """A step is over."""
        ms = 12.0 + 0.2 * (16 + nodes)
        timing = StepTiming(16, 16 + nodes, nodes, 0, tokens, ms, is_decode_only)
        for listener in (self.learning, self.replanning):
            listener.stepped(StepRecord(None, empty_trees([]), nothing_accepted(0), timing))


def test_a_request_that_is_surely_below_hears_of_its_own_plan_in_its_next_verdict() -> None:
    engine = Engine()
    engine.link.beats.append(BEAT)
    for _ in range(24):
        engine.step()
    assert engine.plans == {}, "960 tokens are no 1,000"
    engine.step()
    assert set(engine.plans) == {"15"}
    assert engine.drafter.state()["one"]["own_plans"] == 1
    own, windows = engine.plans["15"], ints(engine.heard().windows).tolist()
    assert windows == [8] * 15 + [-own.window if own.mode is Mode.COUPLED else own.window]
    assert own.window < 8, "it drafts less than the others"


def test_who_matches_again_goes_back_to_the_window_of_all() -> None:
    engine = Engine(every=100)
    engine.link.beats.append(BEAT)
    for _ in range(3):
        engine.step()
    assert set(engine.plans) == {"15"}
    engine.rates["15"] = 0.88
    for _ in range(3):
        engine.step()
    assert engine.plans == {}
    told = engine.heard()
    assert told.window == 8 and not told.windows


def test_a_stream_that_is_opened_anew_keeps_its_plan() -> None:
    engine = Engine()
    engine.link.plans = {"3": OwnPlan(2, Mode.COUPLED)}
    engine.link.forget("3")
    told = engine.heard()
    assert [(one.window, one.is_coupled) for one in told.opened] == [(2, True)] and len(told.closed) == 8


def test_nothing_is_planned_before_both_times_are_known() -> None:
    engine = Engine(every=1)
    engine.step()
    assert engine.plans == {}, "the drafter has not said what its passes take"
    engine.link.beats.append(Beat())
    engine.step()
    assert engine.plans == {}, "nor has it done anything"
    engine = Engine(every=1)
    engine.link.beats.append(BEAT)
    engine.step(is_decode_only=False)
    assert engine.plans == {}, "a step with a prompt in it says nothing of those without"
    engine.step()
    assert set(engine.plans) == {"15"}


def test_while_drafters_rest_steps_count_for_nothing() -> None:
    engine = Engine(every=1)
    engine.link.beats.append(BEAT)
    engine.drafter.rest(True)
    engine.step()
    assert engine.plans == {}
    engine.drafter.rest(False)
    engine.step()
    assert set(engine.plans) == {"15"}


def test_turned_off_all_requests_have_the_window_of_their_drafter() -> None:
    engine = Engine(every=1)
    engine.link.beats.append(BEAT)
    engine.step()
    assert set(engine.plans) == {"15"}
    engine.replanning.turn(False)
    told = engine.heard()
    assert told.window == 8 and not told.windows
    engine.step()
    assert engine.plans == {}
    engine.replanning.turn(True)
    engine.step()
    assert set(engine.plans) == {"15"}


@pytest.mark.parametrize("printed", [False, True])
def test_plans_are_those_of_the_lines_that_were_learned(printed: bool) -> None:
    engine = Engine(every=1000, printed=printed)
    engine.link.beats.extend([BEAT] * 5)
    for i in range(25):
        engine.step(nodes=16 + i % 3 * 16)
    # 12 + 0.2 per row, and passes of 9 ms
    lines = engine.learning.lines(engine.link)
    assert lines is not None
    group = Group(*lines, 8)
    assert group.verify.ms(16, 2.0) == pytest.approx(12.0 + 0.2 * 48, rel=0.02)
    assert group.draft.ms(16) == pytest.approx(9.0, rel=0.02)
    assert engine.plans == reconfigure(group, engine.match_counts(), printed=printed)
