"""Drafters that take time beside one that takes none, in an engine of a few lines with a clock of its own."""

from __future__ import annotations

import numpy as np

from tests.drafters import Says, requests_of
from tests.trees import batch_of
from vllm_specrollout.budgets.base import SHARE
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import EMPTY_TREE, DraftLimits, RequestBatch, StepTiming, TreeBatch, VerifyResult

PLAIN_MS, NODE_MS = 10.0, 0.05
SIZE = 8


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms / 1e3


class Expensive(Says):
    """Takes time whenever it is asked, and notes for whom."""

    def __init__(self, clock: Clock, ms: float) -> None:
        super().__init__("model", [11, 12, 13], probability=0.8, source=1)
        self.clock, self.cost_ms = clock, ms
        self.of: list[list[int]] = []

    def answer(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.clock.ms += self.cost_ms
        self.of.append(np.flatnonzero(limits.wanted(self.source)).tolist())
        return super().answer(batch, limits)


class Knows(Says):
    """Drafts for the first requests alone."""

    def __init__(self, num_known: int) -> None:
        super().__init__("history", [11, 12, 13, 14], probability=0.95)
        self.num_known = num_known

    def answer(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        trees = super().answer(batch, limits)
        own = [trees.tree(i) if i < self.num_known else EMPTY_TREE for i in range(batch.size)]
        return batch_of(own, batch.request_ids)


class Engine:
    """Accepts each drafter's nodes with a probability of their own."""

    def __init__(self, num_known: int, *, model_ms: float, met: float) -> None:
        self.clock = Clock()
        self.model, self.history = Expensive(self.clock, model_ms), Knows(num_known)
        self.speculator = Speculator([self.history, self.model], GoodputBudget(8, 8), clock=self.clock)
        self.rates = np.asarray([0.95, met])
        self._rng = np.random.default_rng(0)
        self.step_number = 0

    def step(self) -> list[int]:
        """One engine step.

        Returns:
            the requests that the model was asked for.
        """
        step, self.step_number = self.step_number, self.step_number + 1
        asked, ask_begin = len(self.model.of), self.clock.ms
        if self.speculator.is_paused(step, SIZE):
            trees, planned = batch_of([EMPTY_TREE] * SIZE), None
        else:
            planned = self.speculator.propose(requests_of(SIZE), step)
            trees = planned.plan.trees
        ask_ms = self.clock.ms - ask_begin
        accepted: list[int] = []
        counts = np.zeros(SIZE, np.int32)
        for i in range(SIZE):
            for node, source in enumerate(trees.tree(i).source.tolist()):
                if self._rng.random() >= self.rates[source]:
                    break
                accepted.append(node)
                counts[i] += 1
        self.speculator.observe(planned, trees, VerifyResult(counts, np.asarray(accepted, np.int32)))
        ms = PLAIN_MS + NODE_MS * trees.num_nodes
        self.clock.ms += ms
        rows = SIZE + trees.num_nodes
        timing = StepTiming(SIZE, rows, trees.num_nodes, 0, SIZE + len(accepted), ms + ask_ms, True, ask_ms=ask_ms)
        self.speculator.timed(timing)
        return self.model.of[-1] if len(self.model.of) > asked else []


def test_an_expensive_drafter_is_asked_for_the_requests_that_have_no_draft_otherwise() -> None:
    engine = Engine(num_known=5, model_ms=2.0, met=0.8)
    asked = [engine.step() for _ in range(200)][100:]
    assert np.mean([own == [5, 6, 7] for own in asked]) > 0.9


def test_where_every_request_has_a_good_draft_it_is_hardly_asked() -> None:
    engine = Engine(num_known=SIZE, model_ms=2.0, met=0.8)
    asked = [engine.step() for _ in range(400)]
    assert 1 <= 2.0 * sum(map(bool, asked[200:])) <= (SHARE + 0.001) * 200 * 1.2 * PLAIN_MS


def test_one_that_is_never_right_is_off_within_50_steps_and_the_other_one_goes_on() -> None:
    engine = Engine(num_known=4, model_ms=2.0, met=0.0)
    asked = [engine.step() for _ in range(200)]
    assert (
        sum(map(bool, asked[:50])) <= 10 and 2.0 * sum(map(bool, asked[50:])) <= (SHARE + 0.001) * 150 * 1.2 * PLAIN_MS
    )
    assert len(engine.history.asked) > 150


def test_alone_it_is_asked_for_all_while_it_pays() -> None:
    engine = Engine(num_known=0, model_ms=2.0, met=0.8)
    asked = [engine.step() for _ in range(100)]
    assert np.mean([own == list(range(SIZE)) for own in asked]) > 0.9


def test_alone_and_never_right_it_takes_little_time() -> None:
    engine = Engine(num_known=0, model_ms=2.0, met=0.0)
    asked = [engine.step() for _ in range(400)]
    assert sum(map(bool, asked)) <= 30


def test_history_that_comes_to_know_all_requests_ends_the_asking_at_once() -> None:
    engine = Engine(num_known=2, model_ms=2.0, met=0.8)
    for _ in range(100):
        engine.step()
    engine.history.num_known = SIZE
    assert sum(bool(engine.step()) for _ in range(20)) <= 2


def test_one_that_works_ahead_hears_in_every_step_what_holds() -> None:
    engine = Engine(num_known=SIZE, model_ms=2.0, met=0.8)
    engine.model.works_ahead = True
    assert all(engine.step() == list(range(SIZE)) for _ in range(100))
