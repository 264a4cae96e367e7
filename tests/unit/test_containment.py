"""Whatever a drafter or a budget does, a step yields sound trees or none, and the culprit is named once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from vllm_specrollout import _core
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.guard import Guard
from vllm_specrollout.metrics import Meter, MeteredSpeculation
from vllm_specrollout.policies.budget import FixedBudget, Policy
from vllm_specrollout.policies.presets import make_policy
from vllm_specrollout.step import Speculation
from vllm_specrollout.trees.build import check
from vllm_specrollout.types import (
    EMPTY_TREE,
    Choice,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Status,
    StepTiming,
    chain,
)
from vllm_specrollout.worker.picking import CORE
from vllm_specrollout.worker.unite import unite

VOCAB = 512
VIEWS = [RequestView(f"r{i}", np.arange(20, dtype=np.int32), 10, 100) for i in range(2)]
ENDING = Ending("r0", "p", np.zeros(10, np.int32), np.zeros(10, np.int32), Status.FINISHED)
NONE = np.empty(0, np.int32)
FEEDBACK = [Feedback("r0", 1, 0, NONE, NONE, NONE.astype(np.float32), NONE)]


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


class Sound:
    """Proposes the same tree for everybody; a fault overrides one of its methods."""

    name = "sound"

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        return [_tree([-1, 0]) for _ in views]

    def observe(self, feedback: Sequence[Feedback]) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def forget(self, request_id: str) -> None: ...


def _raise(*_: object) -> None:
    raise RuntimeError("a mistake")


def _leave(*_: object) -> None:
    raise SystemExit(3)


def _says(tree: DraftTree | None) -> Callable[..., object]:
    return lambda views, decisions: [tree for _ in views]


_INT64 = DraftTree(
    np.arange(2), np.asarray([-1, 0], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32)
)  # fmt: skip
# what a drafter may do -> the method that does it, what it does
DRAFTER_FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "propose raises": ("propose", _raise),
    "propose ends the process": ("propose", _leave),
    "observe raises": ("observe", _raise),
    "finish raises": ("finish", _raise),
    "forget raises": ("forget", _raise),
    "nothing instead of a list": ("propose", lambda views, decisions: None),
    "a list that is too short": ("propose", lambda views, decisions: [_tree([-1])]),
    "a list of nothings": ("propose", _says(None)),
    "a parent after its child": ("propose", _says(_tree([1, -1]))),
    "a parent far outside": ("propose", _says(_tree([-1, 1 << 29]))),
    "a parent below the root": ("propose", _says(_tree([-2]))),
    "probabilities that are not numbers": ("propose", _says(_tree([-1, 0], log_q=[np.nan, np.nan]))),
    "probabilities of zero": ("propose", _says(_tree([-1, 0], log_q=[-np.inf, -np.inf]))),
    "probabilities above one": ("propose", _says(_tree([-1, 0], log_q=[100.0, 100.0]))),
    "an unknown source": ("propose", _says(_tree([-1, 0], source=99))),
    "tokens in another type": ("propose", _says(_INT64)),
    "a token below zero": ("propose", _says(_tree([-1, 0], tokens=[-5, 3]))),
    "a token beyond the vocabulary": ("propose", _says(_tree([-1, 0], tokens=[3, VOCAB]))),
    "columns of different lengths": (
        "propose",
        _says(DraftTree(chain([1, 2]).token_ids, chain([1]).parents, chain([1, 2]).log_q, chain([1, 2]).source)),
    ),
}
BUDGETS: dict[str, Callable[[], Policy]] = {
    "auto": lambda: make_policy(SpecRolloutConfig(), kernels=CORE),
    "fixed": lambda: FixedBudget(8, 8),
}


def _faulty(method: str, does: Callable[..., object]) -> Drafter:
    drafter = Sound()
    drafter.name = "bad"
    setattr(drafter, method, does)
    return drafter


def _run(speculation: Speculation, steps: int = 30) -> list[list[DraftTree]]:
    """Steps of an engine's life; every tree is one that the target could be given."""
    drafted = []
    for _ in range(steps):
        if speculation.rests(len(VIEWS)):
            continue
        trees = speculation.prepare(VIEWS)
        assert len(trees) == len(VIEWS)
        for tree, view in zip(trees, VIEWS, strict=True):
            check(tree)
            assert tree.size <= 64 and not tree.size or 0 <= tree.token_ids.min() <= tree.token_ids.max() < VOCAB
            _core.scratch_needed(tree.parents, len(view.token_ids) - 1, 32)
        drafted.append(trees)
        speculation.settle(FEEDBACK, None)
    speculation.finish(ENDING)
    speculation.forget("r0")
    return drafted


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_drafter_that_errs_is_switched_off_and_the_other_one_goes_on(
    fault: str, budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Sound()
    drafters = [_faulty(*DRAFTER_FAULTS[fault]), survivor]
    meter = Meter(("bad", "sound"), 1)
    speculation = MeteredSpeculation(
        drafters, BUDGETS[budget](), unite, meter, vocab_size=VOCAB, guard=Guard(is_strict=False)
    )
    with caplog.at_level(logging.ERROR):
        drafted = _run(speculation)
    assert speculation.drafters == [survivor]
    assert any(tree.size for trees in drafted for tree in trees)
    assert speculation.guard.failures == {"drafter bad": 1}
    assert (
        [record.getMessage() for record in caplog.records].count(
            "Spec rollout: drafter bad failed; it is switched off, and requests go on without its drafts"
        )
        == len(caplog.records)
        == 1
    )
    assert meter.take()["failures/drafter bad"] == 1


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_strict_guard_lets_every_fault_through(fault: str) -> None:
    speculation = Speculation(
        [_faulty(*DRAFTER_FAULTS[fault])], FixedBudget(8, 8), unite, vocab_size=VOCAB, guard=Guard(is_strict=True)
    )
    with pytest.raises((RuntimeError, SystemExit, TypeError, ValueError, AttributeError)):
        _run(speculation)


class Broken(FixedBudget):
    """A budget one of whose methods is overridden."""

    def __init__(self, method: str, does: Callable[..., object]) -> None:
        super().__init__(8, 8)
        self.closed = 0
        setattr(self, method, does)

    def close(self) -> None:
        self.closed += 1


BUDGET_FAULTS: dict[str, tuple[str, Callable[..., object]]] = {
    "rests raises": ("rests", _raise),
    "decide raises": ("decide", _raise),
    "decide forgets a request": ("decide", lambda views: []),
    "choose raises": ("choose", _raise),
    "choose forgets a request": ("choose", lambda trees, decisions: trees[:1]),
    "choose makes something up": ("choose", lambda trees, decisions: [_tree([1, -1]) for _ in trees]),
    "observe raises": ("observe", _raise),
    "finish raises": ("finish", _raise),
}


@pytest.mark.parametrize("fault", BUDGET_FAULTS)
def test_a_budget_that_errs_is_switched_off_and_its_trace_is_ended(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    budget = Broken(*BUDGET_FAULTS[fault])
    speculation = Speculation([Sound()], budget, unite, vocab_size=VOCAB, guard=Guard(is_strict=False))
    _run(speculation)
    assert speculation.policy is not budget and speculation.rests(2)
    assert speculation.guard.failures == {"budget": 1} and budget.closed == 1
    assert "budget failed; drafting is switched off" in caplog.text
    assert all(tree is EMPTY_TREE for tree in speculation.prepare(VIEWS))


def test_a_merge_that_fails_costs_the_drafts_of_its_steps_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    speculation = Speculation(
        [Sound(), Sound()], FixedBudget(8, 8), lambda groups, most: _raise() or [], guard=Guard(is_strict=False)
    )
    assert _run(speculation) == [[EMPTY_TREE] * 2] * 30
    assert len(speculation.drafters) == 2 and speculation.guard.failures == {"merging drafts": 30}
    assert caplog.text.count("merging drafts failed") == 1


def test_counting_that_fails_costs_no_drafts() -> None:
    class Miscounts(Meter):
        def settled(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
            raise ZeroDivisionError

        def chose(self, choice: Choice | None, nodes: int) -> None:
            raise ZeroDivisionError

    speculation = MeteredSpeculation(
        [Sound()], FixedBudget(8, 8), unite, Miscounts(("sound",), 1), guard=Guard(is_strict=False)
    )
    assert all(tree.size for trees in _run(speculation) for tree in trees)
    assert speculation.guard.failures == {"counting": 60}


def test_a_tree_that_is_not_sorted_is_sorted_and_one_that_is_far_too_large_is_cut() -> None:
    unsorted, large = Sound(), Sound()
    unsorted.propose = lambda views, decisions: [_tree([-1, -1], log_q=[-3.0, -0.1]) for _ in views]  # type: ignore[method-assign]
    large.propose = lambda views, decisions: [chain([7] * 1000) for _ in views]  # type: ignore[method-assign]
    (tree, _), (cut, _) = (
        Speculation([drafter], FixedBudget(64, 64), unite, guard=Guard(is_strict=True)).prepare(VIEWS)
        for drafter in (unsorted, large)
    )
    assert tree.token_ids.tolist() == [1, 0] and tree.log_q.tolist() == [np.float32(-0.1), -3.0]
    assert cut.size == 64


def test_keyboard_interrupts_are_nobodys_failure() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    speculation = Speculation([_faulty("propose", interrupt)], FixedBudget(8, 8), guard=Guard(is_strict=False))
    with pytest.raises(KeyboardInterrupt):
        speculation.prepare(VIEWS)
    assert len(speculation.drafters) == 1
