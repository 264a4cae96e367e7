"""When idle engines prefill, when a trainer trains, halts, publishes and goes back; over a group's rollout too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from vllm_specrollout.training import spot
from vllm_specrollout.training.spot import Doing, Halt, HeardEngine, HeardTrainer, MatchRate, Prefill, Publish, Train

GOOD, FALLEN = MatchRate(10_000, 8_000), MatchRate(10_000, 7_400)
STILL = HeardEngine(Doing.IDLE, 0.0, rate_then=GOOD, rate_now=GOOD)
DRIFTED = replace(STILL, rate_now=FALLEN)
LEARNS = HeardTrainer(is_learning=True, is_halted=False, wants_rows=True, step_s=0.1, levels=6)


def said(
    engine: HeardEngine = STILL, trainer: HeardTrainer | None = None, now: float = 100.0, **given: Any
) -> list[Any]:
    return spot.decide(spot.Heard(now, (engine,), trainer or HeardTrainer(), **given))


@pytest.mark.parametrize(
    ("now", "learns"),
    [
        pytest.param(GOOD, False, id="by nothing"),
        pytest.param(MatchRate(10_000, 7_700), True, id="by four percent"),
        pytest.param(MatchRate(10_000, 7_800), False, id="by two and a half"),
        pytest.param(MatchRate(spot.ENOUGH - 1, 2_000), False, id="by few positions"),
    ],
)
def test_learning_begins_when_the_match_rate_has_fallen(now: MatchRate, learns: bool) -> None:
    assert said(replace(STILL, rate_now=now)) == ([Train()] if learns else [])
    assert learns or said(replace(STILL, rate_now=now, has_answers=True)) == []


def test_what_chance_does_begins_no_learning() -> None:
    seldom = replace(STILL, rate_then=MatchRate(100_000, 30_000))
    assert said(replace(seldom, rate_now=MatchRate(4_500, 1_290))) == []
    assert said(replace(seldom, rate_now=MatchRate(450_000, 129_000))) == [Train()]


def test_without_a_head_learning_begins_at_once() -> None:
    assert said(HeardEngine(Doing.IDLE, 0.0, has_head=False)) == [Train()]


def test_a_trainer_on_the_engines_device_waits_for_a_turn_and_a_step_of_idleness() -> None:
    engine = replace(DRIFTED, since=99.0, turn_s=0.8)
    trainer = HeardTrainer(is_learning=True, step_s=0.3)
    assert said(engine, trainer) == []
    assert said(engine, trainer, now=100.2) == [Train()]


@pytest.mark.parametrize("doing", [Doing.BUSY, Doing.DRAFTING])
def test_users_and_lent_drafters_come_first(doing: Doing) -> None:
    engine = replace(DRIFTED, doing=doing, has_answers=True)
    assert said(engine) == []
    assert said(engine, LEARNS) == [Halt()]
    assert said(engine, replace(LEARNS, is_halted=True)) == []


def test_a_trainer_with_a_device_of_its_own_is_never_halted() -> None:
    busy = replace(DRIFTED, doing=Doing.BUSY)
    assert said(busy, has_own=True) == [Train()]
    assert said(busy, LEARNS, has_own=True) == []


def test_rows_come_before_training_on_the_same_device() -> None:
    trains = replace(DRIFTED, doing=Doing.TRAINING, has_answers=True)
    assert said(trains, LEARNS) == [Halt()]
    halted = replace(LEARNS, is_halted=True)
    assert said(replace(trains, doing=Doing.IDLE), halted) == [Prefill(0)]
    assert said(replace(trains, doing=Doing.IDLE, has_answers=False), halted) == [Train()]
    # with room for no more rows, it trains
    assert said(replace(trains, doing=Doing.IDLE), replace(halted, wants_rows=False)) == [Train()]


def test_others_only_prefill() -> None:
    engine = replace(DRIFTED, has_answers=True)
    assert said(engine, LEARNS, leader=None) == [Prefill(0)]
    assert said(engine, replace(LEARNS, wants_rows=False), leader=None) == []


def test_what_judges_one_percent_better_is_published_once_probation_is_over() -> None:
    better = replace(LEARNS, own=3.04, serving=3.0)
    assert said(replace(DRIFTED, doing=Doing.TRAINING), better) == [Publish()]
    assert said(replace(DRIFTED, doing=Doing.TRAINING), replace(better, own=3.02)) == []
    assert said(replace(DRIFTED, doing=Doing.TRAINING), replace(better, is_publishing=True)) == []
    young = replace(DRIFTED, doing=Doing.TRAINING, rate_then=MatchRate(spot.ENOUGH - 1, 2_000))
    assert said(young, better) == []


def test_a_first_head_is_published_when_it_is_worth_its_passes() -> None:
    engine = HeardEngine(Doing.TRAINING, 0.0, has_head=False)
    assert said(engine, replace(LEARNS, own=6 * spot.WORTH - 0.01, serving=0.01)) == []
    assert said(engine, replace(LEARNS, own=6 * spot.WORTH, serving=0.01)) == [Publish()]


def test_an_engine_that_went_back_is_told_to_the_trainer_once_and_before_anything_is_published() -> None:
    engine = replace(DRIFTED, doing=Doing.TRAINING, went_back=1)
    assert said(engine, replace(LEARNS, own=9.0, serving=3.0)) == [spot.Back()]
    assert said(engine, replace(LEARNS, backs=1)) == []


def test_rates_are_of_the_first_and_of_the_last_positions_and_begin_anew() -> None:
    rates = spot.MatchRates()
    for step in range(1, 101):
        rates.hear(step * 200, 160 * min(step, 50) + 100 * max(step - 50, 0))
    assert rates.then.share == pytest.approx(0.8) and spot.ENOUGH <= rates.then.positions < spot.ENOUGH + 200
    assert rates.now.share == pytest.approx(0.5) and spot.ENOUGH <= rates.now.positions < spot.ENOUGH + 200
    assert rates.now.has_fallen(rates.then)
    rates.begin_anew()
    assert rates.then == rates.now == MatchRate() and not rates.now.has_fallen(rates.then)
    rates.hear(20_000 + spot.ENOUGH, 13_000 + spot.ENOUGH)
    assert rates.then.share == rates.now.share == 1.0


# --- a group of four over epochs with a long tail ---------------------------------------------------------------------

TICK, STEP_S, TURN_S = 0.05, 0.3, 1.0


@dataclass
class Group:
    """Four engines, their requests' times by trace; a trainer beside the first one. Time goes on by ticks."""

    # [engines] (begin, end) of each request
    trace: list[list[tuple[float, float]]]
    has_own: bool = False
    now: float = 0.0
    trainer: HeardTrainer = HeardTrainer(is_halted=True, step_s=STEP_S)
    step_ends: float = 0.0
    steps: int = 0
    halts: int = 0
    rows: int = 0
    prefills: list[int] = field(default_factory=lambda: [0] * 4)
    turn_ends: list[float] = field(default_factory=lambda: [0.0] * 4)
    # (engine, begin) of a request -> how long it waited
    delays: dict[tuple[int, float], float] = field(default_factory=dict)
    # the match rate has fallen, so there is something to learn all along
    engines: list[HeardEngine] = field(default_factory=lambda: [DRIFTED] * 4)

    def run(self) -> Group:
        last = max(end for own in self.trace for _, end in own)
        while self.now < last + 10.0:
            self.tick()
            self.now += TICK
        return self

    def tick(self) -> None:
        for i, trace in enumerate(self.trace):
            runs = [one for one in trace if one[0] <= self.now < one[1]]
            # it waits for the optimiser step under way on its device
            delay = max(self.step_ends - self.now, 0.0) if i == 0 and not self.has_own else 0.0
            for begin, _ in runs:
                self.delays.setdefault((i, begin), delay)
            was = self.engines[i]
            trains = i == 0 and not self.has_own and not self.trainer.is_halted
            doing = Doing.BUSY if runs else Doing.TRAINING if trains else Doing.IDLE
            since = was.since if doing is was.doing else self.now
            self.engines[i] = replace(was, doing=doing, since=since, has_answers=was.has_answers or bool(runs))
        for action in spot.decide(spot.Heard(self.now, tuple(self.engines), self.trainer, 0, self.has_own)):
            self.do(action)
        if not self.trainer.is_halted and self.now >= self.step_ends and self.rows >= 256:
            self.step_ends, self.steps, self.rows = self.now + STEP_S, self.steps + 1, self.rows - 256

    def do(self, action: Any) -> None:
        match action:
            case Train():
                self.trainer = replace(self.trainer, is_learning=True, is_halted=False, wants_rows=True)
            case Halt():
                self.halts += 1
                self.trainer = replace(self.trainer, is_halted=True)
            case Prefill(i):
                assert self.engines[i].doing is Doing.IDLE
                if self.now >= self.turn_ends[i]:
                    self.prefills[i] += 1
                    self.turn_ends[i] = self.now + TURN_S
                    self.rows += 4096
                    self.engines[i] = replace(self.engines[i], has_answers=False, turn_s=TURN_S)


def long_tailed(seed: int, epochs: int = 6) -> list[list[tuple[float, float]]]:
    """Each epoch, all engines get requests at once, of which few are long; one more comes to the first engine while the
    tail runs elsewhere; then the policy is updated."""
    draws, begin = np.random.default_rng(seed), 0.0
    trace: list[list[tuple[float, float]]] = [[] for _ in range(4)]
    for _ in range(epochs):
        ends = begin + 2.0 + draws.pareto(1.5, size=(4, 16)) * 2.0
        ends = np.minimum(ends, begin + 60.0)
        for own, row in zip(trace, ends.tolist(), strict=True):
            own += [(begin, end) for end in row]
        first, last = max(end for _, end in trace[0]), float(ends.max())
        for late in draws.uniform(first, last + 8.0, 2).tolist():
            trace[0].append((late, late + 1.5))
        begin = max(max(end for _, end in own) for own in trace) + 10.0
    return trace


@pytest.mark.parametrize("seed", range(4))
def test_over_a_groups_rollout_no_request_waits_longer_than_a_step(seed: int) -> None:
    trace = long_tailed(seed)
    group = Group(trace).run()
    assert max(group.delays.values()) <= STEP_S
    assert group.delays.keys() == {(i, begin) for i, own in enumerate(trace) for begin, _ in own}
    # it trained in the tails, was halted for those that came, and each engine gave rows
    assert group.steps > 100 and group.halts >= 6 and min(group.prefills) >= 5
    arrivals = len({begin for begin, _ in trace[0]})
    # twice for each arrival at most: for the request, and for the engine's own rows after it
    assert group.halts <= 2 * arrivals + 1


def test_with_cores_of_its_own_the_trainer_goes_on_through_all_requests() -> None:
    trace = long_tailed(0)
    shared, own = Group(trace).run(), Group(trace, has_own=True).run()
    assert own.halts == 0 and max(own.delays.values()) == 0.0 and own.steps >= shared.steps
