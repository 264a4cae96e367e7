"""The default budget as a whole: what it switches, whom it favours, what it says."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_specrollout.policies.auto import AutoBudget
from vllm_specrollout.policies.switch import PLAIN_PROBE
from vllm_specrollout.types import (
    EMPTY_TREE,
    Choice,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
    Status,
    StepTiming,
    chain,
)


class Engine:
    """A budget and a made-up engine around it: R answers, each draft a chain whose nodes are right with `accuracy`."""

    def __init__(
        self,
        requests: int,
        *,
        fixed: float = 10.0,
        row: float = 0.2,
        jump: float = 0.0,
        ask: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.budget = AutoBudget(16, 16)
        self.rng = np.random.default_rng(seed)
        self.fixed, self.row, self.jump, self.ask = fixed, row, jump, ask
        self.lengths = {f"r{i}": 10 for i in range(requests)}
        self.said: list[Choice] = []
        self.sizes: list[int] = []

    def step(self, accuracy: float, claimed: float = 0.8) -> None:
        names = list(self.lengths)
        views = [RequestView(name, np.zeros(self.lengths[name], np.int32), 4, 10_000) for name in names]
        decisions = self.budget.decide(views)
        trees = [chain(range(d.max_depth), probability=claimed) if d.max_nodes else EMPTY_TREE for d in decisions]
        if any(d.max_nodes for d in decisions):
            trees = self.budget.choose(trees, decisions)
        said = self.budget.explain()
        assert said is not None
        self.said.append(said)
        self.sizes.append(sum(tree.size for tree in trees))
        self.settle(names, trees, accuracy, self.ask if any(d.max_nodes for d in decisions) else 0.0)

    def settle(self, names: list[str], trees: list[DraftTree], accuracy: float, ask_ms: float) -> None:
        feedback, tokens = [], 0
        for name, tree in zip(names, trees, strict=True):
            misses = np.flatnonzero(self.rng.random(tree.size) >= accuracy)
            accepted = int(misses[0]) if len(misses) else tree.size
            self.lengths[name] += accepted + 1
            tokens += accepted + 1
            if tree.size:
                nodes = np.arange(accepted, dtype=np.int32)
                feedback.append(
                    Feedback(name, tree.size, accepted, tree.parents, tree.source, tree.log_q, nodes, len(names))
                )
        nodes = sum(tree.size for tree in trees)
        ms = (self.fixed + self.row * (len(names) + nodes) + self.jump * (nodes > 0)) * float(
            self.rng.normal(1.0, 0.02)
        )
        timing = StepTiming(len(names), len(names) + nodes, nodes, 0, tokens, ms + ask_ms, True, ask_ms=ask_ms)
        self.budget.observe(feedback, timing)


def switches(said: list[Choice]) -> int:
    return sum(one.is_on != other.is_on for one, other in zip(said, said[1:], strict=False))


def test_a_good_drafter_is_used_to_the_full_where_rows_are_cheap() -> None:
    engine = Engine(2, row=0.02)
    for _ in range(60):
        engine.step(accuracy=0.95)
    assert engine.sizes[-1] >= 24
    assert switches(engine.said) == 0


def test_a_drafter_that_turns_bad_is_switched_off_once_and_tried_ever_more_rarely() -> None:
    engine = Engine(8, row=0.4)
    for _ in range(100):
        engine.step(accuracy=0.85)
    assert engine.said[-1].is_on
    for _ in range(400):
        engine.step(accuracy=0.0)
    assert not engine.said[-1].is_on
    assert switches(engine.said) == 1
    assert sum(engine.sizes[-128:]) <= 8


def test_a_drafter_that_turns_good_is_switched_on_again() -> None:
    engine = Engine(4, row=0.2)
    for _ in range(200):
        engine.step(accuracy=0.0)
    assert not engine.said[-1].is_on
    for _ in range(1500):
        engine.step(accuracy=0.95)
    assert engine.said[-1].is_on
    assert switches(engine.said) <= 2


def test_an_engine_whose_rows_cost_a_step_each_is_left_alone() -> None:
    engine = Engine(32, fixed=0.5, row=1.0)
    for _ in range(200):
        engine.step(accuracy=0.6)
    assert not engine.said[-1].is_on
    assert engine.said[-1].reason == "drafts do not pay"


def test_drafts_that_would_save_next_to_nothing_are_not_verified() -> None:
    """Rows at which a node of probability one half saves a sixth of a step, and a fiftieth."""
    shares = {}
    for row in (0.25, 0.55):
        engine = Engine(16, fixed=10.0, row=row)
        for _ in range(300):
            engine.step(accuracy=0.5, claimed=0.5)
        shares[row] = sum(size > 0 for size in engine.sizes[-100:]) / 100
    assert shares[0.25] > 0.8 and shares[0.55] < 0.2


def test_drafters_that_cost_more_to_ask_than_their_drafts_save_are_left_alone() -> None:
    """Drafts that save about a sixth of a step, asked for free, and at the price of a third of one."""
    shares = {}
    for ask in (0.0, 4.0):
        engine = Engine(16, fixed=10.0, row=0.25, ask=ask)
        for _ in range(300):
            engine.step(accuracy=0.5, claimed=0.5)
        shares[ask] = sum(one.is_on for one in engine.said[-100:]) / 100
        # what asking takes is not taken for a step's own time
        assert engine.budget.cost.predict(16) == pytest.approx(14.0, rel=0.1)
    assert shares[0.0] > 0.9 and shares[4.0] < 0.1


def test_a_long_answer_gets_what_the_short_ones_do_not() -> None:
    """Three problems answered before, one of them at length: their next answers are told apart."""
    budget = AutoBudget(16, 16)
    for length, problem in ((30, "a"), (32, "b"), (900, "long")):
        for sample in range(6):
            answer = np.zeros(length + sample, np.int32)
            budget.finish(Ending(f"{problem}{sample}", problem, np.zeros(4, np.int32), answer, Status.FINISHED))
    for rows in [4, 20, 40, 60] * 20:
        budget.observe([], StepTiming(4, rows, rows - 4, 0, 4, 10.0 + 0.5 * rows, True))
    views = [RequestView(p, np.zeros(24, np.int32), 4, 2000, problem_id=p) for p in ("a", "b", "long")]
    chosen = budget.choose([chain(range(16), probability=0.75)] * 3, budget.decide(views))
    sizes = [tree.size for tree in chosen]
    assert sizes[2] > 1.5 * max(sizes[:2])
    even = AutoBudget(16, 16, length_weight=False)
    even.cost, even.lengths = budget.cost, budget.lengths
    assert len({tree.size for tree in even.choose([chain(range(16), probability=0.75)] * 3, even.decide(views))}) == 1


def test_a_long_answer_counts_more_only_if_it_outlasts_what_waits() -> None:
    budget = AutoBudget(16, 16)
    for sample in range(12):
        problem, length = ("long", 900) if sample % 2 else ("short", 30)
        answer = np.zeros(length + sample, np.int32)
        budget.finish(Ending(f"e{sample}", problem, np.zeros(4, np.int32), answer, Status.FINISHED))
    views = [RequestView(p, np.zeros(24, np.int32), 4, 2000, problem_id=p) for p in ("short", "long")]
    for waiting, is_even in ((100, True), (1, False), (0, False)):
        for rows in (4, 20, 40, 60) * 20:
            timing = StepTiming(4, rows, rows - 4, 0, 4, 10.0 + 0.5 * rows, True, waiting=waiting)
            budget.observe([], timing)
        for _ in range(20):  # worth is kept for some steps
            decisions = budget.decide(views)
        sizes = {tree.size for tree in budget.choose([chain(range(16), probability=0.75)] * 2, decisions)}
        assert (len(sizes) == 1) == is_even


def test_a_new_answer_is_taken_to_go_as_fast_as_those_before() -> None:
    """Else its tokens are worth a plain step's share at first, and it drafts more than pays."""
    engine = Engine(4, row=0.5)
    for _ in range(60):
        engine.step(0.8)
    usual = np.mean(engine.sizes[-20:])
    for name in list(engine.lengths):
        answer = np.zeros(engine.lengths.pop(name), np.int32)
        engine.budget.finish(Ending(name, "", np.zeros(4, np.int32), answer, Status.FINISHED))
    engine.lengths = {f"new{i}": 10 for i in range(4)}
    engine.step(0.8)
    assert engine.sizes[-1] <= 1.35 * usual


def test_a_token_is_worth_its_share_of_the_step_where_rows_get_dearer() -> None:
    """Rows are nearly free up to 16 and dear from there; a batch of 16 pays 13 ms for 16 tokens, 0.8 ms each."""
    budget = AutoBudget(16, 16)
    for rows in [8, 16, 24, 48] * 40:
        ms = 12.0 + 0.06 * min(rows, 16) + 0.7 * max(rows - 16, 0)
        budget.observe([], StepTiming(min(rows, 16), rows, max(rows - 16, 0), 0, 16, ms, True))
    views = [RequestView(f"r{i}", np.zeros(24, np.int32), 4, 2000) for i in range(16)]
    hard, easy = chain(range(8), probability=0.7), chain(range(8), probability=0.98)
    for tree, does_pay in ((hard, False), (easy, True)):
        chosen = budget.choose([tree] * 16, budget.decide(views))
        assert any(own.size for own in chosen) == does_pay


def test_single_steps_without_drafts_tell_what_those_cost() -> None:
    """Any draft costs 2 ms besides its row: plain steps are rare, and what they cost is known all the same."""
    engine = Engine(8, row=0.2, jump=2.0)
    for _ in range(200):
        engine.step(0.5, claimed=0.5)
    plain = [said for said in engine.said if said.reason == PLAIN_PROBE]
    assert engine.budget.switch.is_on
    assert 2 <= len(plain) <= 8
    assert engine.said[-1].plain_ms == pytest.approx(11.6, rel=0.05)


def test_drafts_that_save_most_of_a_step_are_not_interrupted() -> None:
    engine = Engine(2, row=0.05)
    for _ in range(200):
        engine.step(0.9, claimed=0.9)
    assert not any(said.reason == PLAIN_PROBE for said in engine.said[20:])


def test_a_pause_asks_no_drafter() -> None:
    engine = Engine(8, fixed=0.5, row=1.0)
    for _ in range(60):
        engine.step(accuracy=0.1)
    views = [RequestView("r0", np.zeros(9, np.int32), 4, 100)]
    engine.budget.switch.left = 5
    assert [d.shape for d in engine.budget.decide(views)] == [Shape.OFF]
    said = engine.budget.explain()
    assert said is not None
    assert (said.is_on, said.reason, said.nodes) == (False, "drafts do not pay", 0)
    assert said.expected_ms == said.plain_ms > 0.0


def test_nothing_is_kept_of_a_request_that_is_over() -> None:
    engine = Engine(3)
    for _ in range(5):
        engine.step(accuracy=0.8)
    for name in list(engine.lengths):
        engine.budget.finish(Ending(name, "", np.zeros(4, np.int32), np.zeros(9, np.int32), Status.FINISHED))
    assert engine.budget._pace == {}
    assert engine.budget.acceptance._requests == {}


def test_the_same_steps_give_the_same_choices() -> None:
    one, other = Engine(4, seed=3), Engine(4, seed=3)
    for engine in (one, other):
        for _ in range(80):
            engine.step(accuracy=0.7)
    assert one.sizes == other.sizes
    assert one.said == other.said


def test_a_budget_that_rests_pauses_for_as_long_as_one_that_is_asked() -> None:
    asked, resting = Engine(8, fixed=0.5, row=1.0), Engine(8, fixed=0.5, row=1.0)
    for _ in range(60):
        asked.step(accuracy=0.1)
        resting.step(accuracy=0.1)
    left = asked.budget.switch.left
    assert left == resting.budget.switch.left > 0 and not resting.budget.switch.is_on
    timing = StepTiming(8, 8, 0, 0, 8, 8.5, True)
    for _ in range(left):
        assert resting.budget.rests(8)
        said = resting.budget.explain()
        assert said is not None and not said.is_on and said.expected_ms > 0.0
        resting.budget.observe([], timing)
    assert not resting.budget.rests(8)
    views = [
        RequestView(name, np.zeros(length + left, np.int32), 4, 10_000) for name, length in resting.lengths.items()
    ]
    assert all(d.max_nodes for d in resting.budget.decide(views))


def test_after_a_pause_a_request_has_gone_as_fast_as_its_steps_were_many() -> None:
    engine = Engine(2)
    for _ in range(40):
        engine.step(accuracy=0.0)
    budget, names = engine.budget, list(engine.lengths)
    budget.switch.is_on, budget.switch.left = False, 6
    for _ in range(6):
        assert budget.rests(2)
    views = [RequestView(name, np.zeros(engine.lengths[name] + 7, np.int32), 4, 10_000) for name in names]
    budget.decide(views)
    assert all(budget._pace[name].tokens_per_step == pytest.approx(1.0, abs=0.05) for name in names)


def test_answers_equally_long_are_drafted_for_less_than_answers_of_which_one_is_as_good_as_another() -> None:
    """Where all need the same, the unluckiest ends the rollout: most of what the others gain is lost."""
    worth = {}
    for known in (True, False):
        budget = AutoBudget(16, 16)
        if known:
            for i in range(160):
                ended = np.zeros(32, np.int32)
                budget.finish(Ending(f"old{i}", f"p{i % 16}", np.zeros(4, np.int32), ended, Status.TRUNCATED))
        views = [RequestView(f"r{i}", np.zeros(8, np.int32), 4, 28, problem_id=f"p{i}") for i in range(16)]
        budget.decide(views)
        worth[known] = float(budget._step.worth.sum())
    assert worth[True] < 0.7 * worth[False]
