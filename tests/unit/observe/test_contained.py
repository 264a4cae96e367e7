"""Whatever a drafter or a budget does, a step yields sound trees or none, and the culprit is named once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.drafters import Says, nothing_accepted
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
    DraftTree,
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


def _tree(
    parents: Sequence[int],
    tokens: Sequence[int] | None = None,
    log_q: Sequence[float] | None = None,
    source: int = 0,
) -> DraftTree:
    n = len(parents)
    return DraftTree(
        np.asarray(range(n) if tokens is None else tokens, np.int32),
        np.asarray(parents, np.int32),
        np.asarray([-0.1] * n if log_q is None else log_q, np.float32),
        np.full(n, source, np.int32),
    )


class Sound(Says):
    """Proposes the same tree for everybody; a fault overrides one of its methods."""

    def __init__(self, source: int = 0) -> None:
        super().__init__("sound", [0, 1], 0.9, source)


def _raise(*_: object) -> None:
    raise RuntimeError("a mistake")


def _leave(*_: object) -> None:
    raise SystemExit(3)


def _says(tree: DraftTree) -> Callable[..., object]:
    """The same tree for everybody, whether or not it is one."""

    def propose(batch: RequestBatch, limits: object) -> TreeBatch:
        sound = batch_of([chain([0] * tree.size)] * batch.size, batch.request_ids)
        columns = ("token_ids", "parents", "log_q", "source")
        return replace(sound, **{name: np.tile(getattr(tree, name), batch.size) for name in columns})

    return propose


def _with(**columns: object) -> Callable[..., object]:
    """Sound trees, some of whose columns are something else."""
    return lambda batch, limits: replace(batch_of([_tree([-1, 0])] * batch.size, batch.request_ids), **columns)


# what a drafter may do -> the method that does it, what it does
DRAFTER_FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "propose raises": ("propose", _raise),
    "propose ends the process": ("propose", _leave),
    "observe raises": ("observe", _raise),
    "finish raises": ("finish", _raise),
    "forget raises": ("forget", _raise),
    "admit raises": ("admit", _raise),
    "nothing instead of trees": ("propose", lambda batch, limits: None),
    "trees of one request only": ("propose", lambda batch, limits: batch_of([_tree([-1])])),
    "columns of nothing": ("propose", _with(token_ids=None)),
    "requests that start beyond the nodes": ("propose", _with(node_start=np.asarray([0, 9, 4], np.int32))),
    "a parent after its child": ("propose", _says(_tree([1, -1]))),
    "a parent far outside": ("propose", _says(_tree([-1, 1 << 29]))),
    "a parent below the root": ("propose", _says(_tree([-2]))),
    "probabilities that are not numbers": ("propose", _says(_tree([-1, 0], log_q=[np.nan, np.nan]))),
    "probabilities of zero": ("propose", _says(_tree([-1, 0], log_q=[-np.inf, -np.inf]))),
    "probabilities above one": ("propose", _says(_tree([-1, 0], log_q=[100.0, 100.0]))),
    "an unknown source": ("propose", _says(_tree([-1, 0], source=99))),
    "tokens in another type": ("propose", _with(token_ids=np.arange(4))),
    "a token below zero": ("propose", _says(_tree([-1, 0], tokens=[-5, 3]))),
    "a token beyond the vocabulary": ("propose", _says(_tree([-1, 0], tokens=[3, VOCAB]))),
    "columns of different lengths": ("propose", _with(parents=np.asarray([-1, 0], np.int32))),
}
BUDGETS: dict[str, Callable[[], Budget]] = {
    "auto": lambda: GoodputBudget(24, 16),
    "fixed": lambda: FixedBudget(8, 8),
}


def _faulty(method: str, does: Callable[..., object]) -> Drafter:
    drafter = Sound()
    drafter.name = "bad"
    setattr(drafter, method, does)
    return drafter


def _run(speculator: Speculator, steps: int = 30) -> list[TreeBatch]:
    """Steps of an engine's life; every tree is one that the target could be given."""
    drafted = []
    for view in VIEWS:
        speculator.admit(view)
    for step in range(steps):
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


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_drafter_that_errs_is_left_alone_and_the_other_one_goes_on(
    fault: str, budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Sound(source=1)
    drafters = [_faulty(*DRAFTER_FAULTS[fault]), survivor]
    metrics = Metrics(("bad", "sound"))
    speculator = Speculator(
        drafters, BUDGETS[budget](), vocab_size=VOCAB, guard=Guard(is_strict=False), listeners=[metrics]
    )
    with caplog.at_level(logging.ERROR):
        drafted = _run(speculator)
    assert speculator.drafters == [survivor]
    assert any(trees.num_nodes for trees in drafted)
    # it is told of both requests, and asked once
    failures = 2 if fault == "admit raises" else 1
    assert speculator.guard.failures == {"drafter bad": failures}
    assert (
        [record.getMessage() for record in caplog.records].count(
            "Spec rollout: drafter bad failed; requests go on without its drafts; it is tried again in 64 steps"
        )
        == len(caplog.records)
        == 1
    )
    assert metrics.take()["failures/drafter bad"] == failures


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_strict_guard_lets_every_fault_through(fault: str) -> None:
    guard = Guard(is_strict=True)
    speculator = Speculator([_faulty(*DRAFTER_FAULTS[fault])], FixedBudget(8, 8), vocab_size=VOCAB, guard=guard)
    with pytest.raises((RuntimeError, SystemExit, TypeError, ValueError, AttributeError)):
        _run(speculator)


class Broken(FixedBudget):
    """A budget one of whose methods is overridden."""

    def __init__(self, method: str, does: Callable[..., object]) -> None:
        super().__init__(8, 8)
        setattr(self, method, does)


def _forgets(proposals: Sequence[TreeBatch], *_: object) -> StepPlan:
    return StepPlan(batch_of([_tree([-1])]), "forgets")


def _makes_up(proposals: Sequence[TreeBatch], *_: object) -> StepPlan:
    return StepPlan(batch_of([_tree([1, -1])] * 2), "makes up")


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
    "choose forgets a request": ("choose", _forgets),
    "choose makes something up": ("choose", _makes_up),
    "observe raises": ("observe", _raise),
    "finish raises": ("finish", _raise),
}


@pytest.mark.parametrize("fault", BUDGET_FAULTS)
def test_a_budget_that_errs_is_left_alone(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    budget = Broken(*BUDGET_FAULTS[fault])
    speculator = Speculator([Sound()], budget, vocab_size=VOCAB, guard=Guard(is_strict=False))
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

    ticks = itertools.count()
    speculator = Speculator(
        [Sound()], Previews(8, 8), vocab_size=VOCAB, guard=Guard(is_strict=False), clock=lambda: next(ticks)
    )
    monkeypatch.setattr(speculator.worth, method, _raise)
    _run(speculator)
    assert speculator.guard.failures == {"budget": 1} and [d.name for d in speculator.drafters] == ["sound"]


def test_a_drafter_that_compares_its_contents_drafts_as_others_do() -> None:
    @dataclass
    class Compares(BaseDrafter):
        table: np.ndarray
        name: str = "compares"

        def propose(self, batch: RequestBatch, limits: object) -> TreeBatch:
            return batch_of([_tree([-1, 0])] * batch.size, batch.request_ids)

    drafters = [Compares(np.zeros(3)), Compares(np.zeros(3), "other")]
    speculator = Speculator(drafters, FixedBudget(8, 8), vocab_size=VOCAB, guard=Guard(is_strict=False))
    assert all(trees.num_nodes for trees in _run(speculator)) and speculator.guard.failures == {}
    speculator.drop(drafters[1], RuntimeError("gone"))
    assert all(trees.num_nodes for trees in _run(speculator)) and len(speculator.drafters) == 1


def test_counting_that_fails_costs_no_drafts() -> None:
    class Miscounts(Metrics):
        def stepped(self, record: object) -> None:
            raise ZeroDivisionError

        def planned(self, *_: object) -> None:
            raise ZeroDivisionError

    listeners = [Miscounts(("sound",))]
    speculator = Speculator([Sound()], FixedBudget(8, 8), guard=Guard(is_strict=False), listeners=listeners)
    assert all(trees.num_nodes == 4 for trees in _run(speculator))
    assert speculator.guard.failures == {"watching": 60}


def test_a_tree_that_is_not_sorted_is_sorted_and_one_that_is_far_too_large_is_cut() -> None:
    unsorted = _faulty("propose", _says(_tree([-1, -1], log_q=[-3.0, -0.1])))
    large = _faulty("propose", _says(chain([7] * 1000)))
    (tree, cut) = (
        Speculator([drafter], FixedBudget(64, 64), guard=Guard(is_strict=True)).propose(BATCH, 0).plan.trees.tree(0)
        for drafter in (unsorted, large)
    )
    assert tree.token_ids.tolist() == [1, 0] and tree.log_q.tolist() == [np.float32(-0.1), -3.0]
    assert cut.size == 64


def test_keyboard_interrupts_are_nobodys_failure() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    speculator = Speculator([_faulty("propose", interrupt)], FixedBudget(8, 8), guard=Guard(is_strict=False))
    with pytest.raises(KeyboardInterrupt):
        speculator.propose(BATCH, 0)
    assert len(speculator.drafters) == 1


class Deaf(Metrics):
    """Fails at whatever it is told, failures included."""

    def _fails(self, *_: object) -> None:
        raise ZeroDivisionError

    admitted = planned = paused = stepped = finished = failed = drafters_alive = closed = _fails


@pytest.mark.parametrize("drafter", ["sound", "broken"])
def test_a_listener_that_fails_at_being_told_of_failures_ends_nothing(drafter: str) -> None:
    metrics = Metrics(("bad", "sound"))
    drafters = [_faulty("forget" if drafter == "broken" else "nothing", _raise), Sound(source=1)]
    guard = Guard(is_strict=False)
    speculator = Speculator(drafters, FixedBudget(8, 8), guard=guard, listeners=[Deaf(("bad",)), metrics])
    assert any(trees.num_nodes for trees in _run(speculator))
    speculator.drop(speculator.drafters[-1], RuntimeError("gone"))
    speculator.close()
    counts = metrics.take()
    # the others are told all the same
    assert counts["failures/drafter sound"] == 1 and counts["failures/watching"] > 30
    assert guard.failures["drafter sound"] == 1 and guard.failures["watching"] > 60
    assert guard.failures.get("drafter bad", 0) == (drafter == "broken")
