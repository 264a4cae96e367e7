import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.drafters import Says, nothing_accepted
from tests.faults import breaking
from tests.reference.trees import check
from tests.trees import batch_of, chain
from vllm_specrollout import _core
from vllm_specrollout.budgets.base import Budget, bounded
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.budgets.goodput import GoodputBudget
from vllm_specrollout.drafters.base import BaseDrafter, Drafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.observe.metrics import Metrics
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    FinishReason,
    RequestBatch,
    RequestView,
    StepPlan,
    TreeBatch,
    empty_trees,
)

VOCAB = 512
VIEWS = [RequestView(f"r{i}", np.arange(20, dtype=np.int32), 10, 100) for i in range(2)]
BATCH = RequestBatch.of(VIEWS)
ENDING = Answer("r0", "p", np.zeros(10, np.int32), np.zeros(10, np.int32), FinishReason.FINISHED)


class Sound(Says):
    """Proposes the same tree for everybody; a fault overrides one of its methods."""

    def __init__(self, source: int = 0) -> None:
        super().__init__("sound", [0, 1], 0.9, source)


def _raise(*_: object) -> None:
    raise RuntimeError("a mistake")


def _with(**columns: object) -> Callable[..., object]:
    """Sound trees of two nodes for everybody, some of whose columns are something else."""
    return lambda batch, limits: replace(batch_of([chain([0, 1])] * batch.size, batch.request_ids), **columns)


def _each(*values: float) -> np.ndarray:
    """A column of two requests with these values."""
    return np.tile(np.asarray(values, np.float32 if isinstance(values[0], float) else np.int32), 2)


# what a drafter may do, beside the faults of random schedules: what it proposes
EDGES = {
    "a parent below the root": _with(parents=_each(-2, 0)),
    "a token at the end of the vocabulary": _with(token_ids=_each(3, VOCAB)),
    "probabilities of zero": _with(log_q=_each(-np.inf, -np.inf)),
    "columns of different lengths": _with(parents=np.asarray([-1, 0], np.int32)),
}
FAULTS = [*(fault for fault in breaking.DRAFTER_FAULTS if fault not in breaking.HARMLESS), *EDGES]


def _proposing(propose: Callable[..., object]) -> Drafter:
    drafter = Sound()
    drafter.name, drafter.propose = "bad", propose  # type: ignore[method-assign, assignment]
    return drafter


def _faulty(fault: str) -> Drafter:
    if fault in EDGES:
        return _proposing(EDGES[fault])
    sound: Any = Sound()
    sound.vocab_size, sound.rng = VOCAB, None
    drafter = breaking.Broken(sound, "bad")
    drafter.break_by(fault)
    return drafter


def contained(*drafters: Drafter, budget: Budget | None = None, **given: Any) -> Speculator:
    budget = budget if budget is not None else FixedBudget(8, 8)
    return Speculator(drafters, budget, vocab_size=VOCAB, guard=Guard(is_strict=False), **given)


def _run(speculator: Speculator) -> list[TreeBatch]:
    """Steps of an engine's life; every tree is one that the target could be given."""
    drafted = []
    for view in VIEWS:
        speculator.admit(view)
    for step in range(30):
        if speculator.is_paused(step, len(VIEWS)):
            continue
        planned = speculator.propose(BATCH, step)
        trees = planned.plan.trees
        assert trees.num_requests == len(VIEWS)
        for tree in map(trees.tree, range(len(VIEWS))):
            check(tree)
            assert tree.size <= 64 and not tree.size or 0 <= tree.token_ids.min() <= tree.token_ids.max() < VOCAB
        roots = np.asarray([len(view.token_ids) - 1 for view in VIEWS], np.int32)
        _core.without_scratch(trees.node_start, trees.parents, roots, 32, 64)
        drafted.append(trees)
        speculator.observe(planned, trees, nothing_accepted(2))
        speculator.timed(None)
    speculator.finish(ENDING)
    speculator.forget("r0")
    return drafted


@pytest.mark.parametrize("budget", [GoodputBudget, FixedBudget])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_errs_is_left_alone_and_the_other_one_goes_on(
    fault: str, budget: type[GoodputBudget | FixedBudget], caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Sound(source=1)
    drafters = [_faulty(fault), survivor]
    metrics = Metrics(("bad", "sound"))
    speculator = contained(*drafters, budget=budget(8, 8), listeners=[metrics])
    with caplog.at_level(logging.ERROR):
        drafted = _run(speculator)
    assert speculator.drafters == [survivor]
    assert any(trees.num_nodes for trees in drafted)
    # it is told of both requests, asked once, and told of an end
    failures = {"admit raises": 2, "dies": 4}.get(fault, 1)
    assert speculator.guard.failures == {"drafter bad": failures}
    assert [record.getMessage() for record in caplog.records] == [
        "Spec rollout: drafter bad failed; requests go on without its drafts; it is tried again in 64 steps"
    ]
    assert metrics.take()["failures/drafter bad"] == failures


@pytest.mark.parametrize("fault", FAULTS)
def test_a_strict_guard_lets_every_fault_through(fault: str) -> None:
    guard = Guard(is_strict=True)
    speculator = Speculator([_faulty(fault)], FixedBudget(8, 8), vocab_size=VOCAB, guard=guard)
    with pytest.raises((RuntimeError, OSError, SystemExit, TypeError, ValueError, AttributeError)):
        _run(speculator)


class Broken(FixedBudget):
    """A budget one of whose methods is overridden."""

    def __init__(self, method: str, does: Callable[..., object]) -> None:
        super().__init__(8, 8)
        setattr(self, method, does)


def _limits(**fields: object) -> Callable[..., object]:
    """Sound limits, one of whose fields is something else."""
    return lambda batch: replace(bounded(batch, 8, 8), **fields)  # type: ignore[arg-type]


def _plan(**fields: object) -> Callable[..., object]:
    return lambda proposals, *_: replace(StepPlan(proposals[0], "all"), **fields)


BUDGET_FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "steps_off raises": ("steps_off", _raise),
    "limits raises": ("limits", _raise),
    "limits forgets a request": ("limits", lambda batch: bounded(RequestBatch.of(VIEWS[:1]), 8, 8)),
    "limits does not know what a token takes": ("limits", _limits(token_ms=None)),
    "limits names drafters of another batch": ("limits", _limits(drafters=np.ones(3, np.uint32))),
    "limits names drafters by fractions": ("limits", _limits(drafters=np.ones(2))),
    "limits is no array": ("limits", _limits(max_nodes=[8, 8])),
    "steps_off is no number": ("steps_off", lambda num_requests: "many"),
    "choose tells of nodes that are not there": ("choose", _plan(reach=np.ones(9, np.float32))),
    "choose does not know what a step takes": ("choose", _plan(expected_ms=None)),
    "choose does not know whether it pays": ("choose", _plan(pays=np.ones(2, np.bool_))),
    "choose raises": ("choose", _raise),
    "choose forgets a request": ("choose", lambda *_: StepPlan(batch_of([chain([0])]), "forgets")),
    "choose makes something up": (
        "choose",
        lambda proposals, *_: StepPlan(_with(parents=_each(1, -1))(BATCH, None), ""),
    ),
    "observe raises": ("observe", _raise),
    "finish raises": ("finish", _raise),
}


@pytest.mark.parametrize("fault", BUDGET_FAULTS)
def test_a_budget_that_errs_is_left_alone(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    speculator = contained(Sound(), budget=Broken(*BUDGET_FAULTS[fault]))
    _run(speculator)
    assert speculator.is_paused(30, 2) and speculator.steps_off(30, 2) > 0
    assert speculator.guard.failures == {"budget": 1}
    assert "budget failed; drafting is off; it is tried again in 64 steps" in caplog.text
    assert speculator.propose(BATCH, 30).plan.trees.num_nodes == 0


@pytest.mark.parametrize("method", ["narrowed", "learn"])
def test_whom_an_expensive_drafter_is_asked_for_is_the_budgets_business_when_it_goes_wrong(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Previews(FixedBudget):
        def limits(self, batch: RequestBatch) -> DraftLimits:
            return replace(super().limits(batch), token_ms=1.0)

        def preview(self, proposals: object, limits: object, batch: RequestBatch, draft_ms: float) -> StepPlan:
            return StepPlan(empty_trees(batch.request_ids), "nothing", reach=np.zeros(0, np.float32), expected_ms=1.0)

    speculator = contained(Sound(), budget=Previews(8, 8), clock=itertools.count().__next__)
    monkeypatch.setattr(speculator.worth, method, _raise)
    _run(speculator)
    assert speculator.guard.failures == {"budget": 1} and [d.name for d in speculator.drafters] == ["sound"]


def test_a_drafter_that_compares_its_contents_drafts_as_others_do() -> None:
    @dataclass
    class Compares(BaseDrafter):
        table: np.ndarray
        name: str = "compares"

        def propose(self, batch: RequestBatch, limits: object) -> TreeBatch:
            return batch_of([chain([0, 1])] * batch.size, batch.request_ids)

    drafters = [Compares(np.zeros(3)), Compares(np.zeros(3), "other")]
    speculator = contained(*drafters)
    assert all(trees.num_nodes for trees in _run(speculator)) and speculator.guard.failures == {}
    speculator.drop(drafters[1], RuntimeError("gone"))
    assert all(trees.num_nodes for trees in _run(speculator)) and len(speculator.drafters) == 1


def test_a_tree_that_is_not_sorted_is_sorted_and_one_that_is_far_too_large_is_cut() -> None:
    unsorted = _with(parents=_each(-1, -1), log_q=_each(-3.0, -0.1))
    tree, cut = (
        contained(_proposing(own), budget=FixedBudget(64, 64)).propose(BATCH, 0).plan.trees.tree(0)
        for own in (unsorted, lambda *_: batch_of([chain([7] * 1000)] * 2, BATCH.request_ids))
    )
    assert tree.token_ids.tolist() == [1, 0] and tree.log_q.tolist() == [np.float32(-0.1), -3.0]
    assert cut.size == 64


def test_keyboard_interrupts_are_nobodys_failure() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    speculator = contained(_proposing(interrupt))
    with pytest.raises(KeyboardInterrupt):
        speculator.propose(BATCH, 0)
    assert len(speculator.drafters) == 1


@pytest.mark.parametrize("drafter", ["sound", "broken"])
def test_a_listener_that_fails_at_being_told_of_failures_ends_nothing(drafter: str) -> None:
    metrics = Metrics(("bad", "sound"))
    drafters = [_faulty("forget raises") if drafter == "broken" else Sound(), Sound(source=1)]
    speculator = contained(*drafters, listeners=[breaking.Deaf(), metrics])
    assert all(trees.num_nodes for trees in _run(speculator))
    speculator.drop(speculator.drafters[-1], RuntimeError("gone"))
    speculator.close()
    counts, failures = metrics.take(), speculator.guard.failures
    # the others are told all the same
    assert counts["failures/drafter sound"] == 1 and counts["failures/watching"] > 30
    assert failures["drafter sound"] == 1 and failures["watching"] > 60
    assert failures.get("drafter bad", 0) == (drafter == "broken")
