"""Drafters that take time beside one that takes none, in an engine of a few lines with a clock of its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.drafters import Says, requests_of
from tests.trees import batch_of
from vllm_specrollout.budgets.base import SHARE
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import EMPTY_TREE, DraftLimits, RequestBatch, StepTiming, TreeBatch, VerifyResult

PLAIN_MS, NODE_MS = 10.0, 0.05
SIZE = 8


COST_MS = 2.0


class Expensive(Says):
    """Takes time whenever it is asked, and notes for whom; it has the clock."""

    def __init__(self) -> None:
        super().__init__("model", [11, 12, 13], probability=0.8, source=1)
        self.now_ms = 0.0
        self.of: list[list[int]] = []

    def answer(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.now_ms += COST_MS
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

    def __init__(self, num_known: int, met: float = 0.8) -> None:
        self.model, self.history = Expensive(), Knows(num_known)
        drafters = [self.history, self.model]
        self.speculator = Speculator(drafters, GoodputBudget(8, 8), clock=lambda: self.model.now_ms / 1e3)
        self.rates = np.asarray([0.95, met])
        self._rng = np.random.default_rng(0)
        self.step_number = 0

    def step(self) -> list[int]:
        """One engine step.

        Returns:
            the requests that the model was asked for.
        """
        step, self.step_number = self.step_number, self.step_number + 1
        asked, ask_begin = len(self.model.of), self.model.now_ms
        if self.speculator.is_paused(step, SIZE):
            trees, planned = batch_of([EMPTY_TREE] * SIZE), None
        else:
            planned = self.speculator.propose(requests_of(SIZE), step)
            trees = planned.plan.trees
        ask_ms = self.model.now_ms - ask_begin
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
        self.model.now_ms += ms
        rows = SIZE + trees.num_nodes
        timing = StepTiming(SIZE, rows, trees.num_nodes, 0, SIZE + len(accepted), ms + ask_ms, True, ask_ms=ask_ms)
        self.speculator.timed(timing)
        return self.model.of[-1] if len(self.model.of) > asked else []

    def steps(self, count: int) -> list[list[int]]:
        return [self.step() for _ in range(count)]


def share(asked: list[list[int]]) -> float:
    """Of the time of plain steps."""
    return COST_MS * sum(map(bool, asked)) / (len(asked) * 1.2 * PLAIN_MS)


@pytest.mark.parametrize(("num_known", "begin"), [(5, 100), (0, 0)])
def test_an_expensive_drafter_is_asked_for_the_requests_that_have_no_draft_otherwise(num_known, begin) -> None:
    asked = Engine(num_known).steps(begin + 100)[begin:]
    assert np.mean([own == list(range(num_known, SIZE)) for own in asked]) > 0.9


def test_where_every_request_has_a_good_draft_it_is_hardly_asked() -> None:
    asked = Engine(num_known=SIZE).steps(400)[200:]
    assert any(asked) and share(asked) <= SHARE + 0.001


def test_one_that_is_never_right_is_off_within_50_steps_and_the_other_one_goes_on() -> None:
    engine = Engine(num_known=4, met=0.0)
    assert sum(map(bool, engine.steps(50))) <= 10 and share(engine.steps(150)) <= SHARE + 0.001
    assert len(engine.history.asked) > 150


def test_alone_and_never_right_it_takes_little_time() -> None:
    assert sum(map(bool, Engine(num_known=0, met=0.0).steps(400))) <= 30


def test_history_that_comes_to_know_all_requests_ends_the_asking_at_once() -> None:
    engine = Engine(num_known=2)
    engine.steps(100)
    engine.history.num_known = SIZE
    assert sum(map(bool, engine.steps(20))) <= 2


def test_one_that_works_ahead_hears_in_every_step_what_holds() -> None:
    engine = Engine(num_known=SIZE)
    engine.model.works_ahead = True
    assert engine.steps(100) == [list(range(SIZE))] * 100
