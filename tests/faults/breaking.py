"""Drafters and budgets that fail, each in its own way. What belongs here: the faults, by name, and what commits them.

A further fault is an entry of DRAFTER_FAULTS: the method in which it shows, and what that does then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from tests.drafters import TreeByTree
from tests.e2e.identity.fuzz import FuzzDrafter
from tests.trees import batch_of, chain
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import EMPTY_TREE, DraftLimits, RequestBatch, RequestView, StepPlan, TreeBatch, VerifyResult

Truth = Callable[[RequestView, int], list[int]]
"""What a request goes on with: its view, and how many tokens are asked for."""


class Knowing(FuzzDrafter):
    """Drafts anything, what is right among it, and says so if it is shown anything but the requests as they are."""

    def __init__(self, truth: Truth, vocab_size: int, seed: int, source: int = 0, quality: float = 0.8) -> None:
        super().__init__({}, vocab_size, seed, quality)
        self.name, self.source, self._truth = f"knowing {source}", source, truth

    def tree(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> Any:
        done = len(view.token_ids) - view.num_prompt_tokens
        # its answers are as long as they have to be
        self.answers = {view.problem_id: [0] * done + self._truth(view, max_depth)}
        tree = super().tree(view, max_nodes, max_depth, is_chain)
        return replace(tree, source=np.full(tree.size, self.source, np.int32))


def _raises(*_: Any) -> NoReturn:
    raise RuntimeError("a mistake")


def _leaves(*_: Any) -> NoReturn:
    raise SystemExit(3)


def _is_gone(*_: Any) -> NoReturn:
    raise ConnectionResetError("the drafter's process is dead")


def _changed(change: Callable[[TreeBatch], Any]) -> Callable[..., Any]:
    """Garbage made of a sound answer."""
    return lambda drafter, batch, limits: change(drafter.sound(batch, limits))


def _lying(drafter: Broken, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
    """Wrong tokens, of which it is certain."""
    trees = drafter.sound(batch, limits)
    return replace(trees, token_ids=(trees.token_ids + 1) % drafter.vocab_size, log_q=np.zeros_like(trees.log_q))


def _filled(trees: TreeBatch, column: str, value: Any) -> TreeBatch:
    return replace(trees, **{column: np.full_like(getattr(trees, column), value)})


DRAFTER_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    **{f"{method} raises": (method, _raises) for method in ("propose", "observe", "admit", "finish", "forget")},
    "ends the process": ("propose", _leaves),
    "dies": ("every method", _is_gone),
    "lies": ("propose", _lying),
    "nothing": ("propose", lambda *_: None),
    "half a batch": ("propose", _changed(lambda trees: batch_of([EMPTY_TREE]))),
    "columns of nothing": ("propose", _changed(lambda trees: replace(trees, token_ids=None))),
    "children first": ("propose", _changed(lambda trees: replace(trees, parents=trees.parents[::-1].copy()))),
    "parents far away": ("propose", _changed(lambda trees: _filled(trees, "parents", 1 << 29))),
    "no numbers": ("propose", _changed(lambda trees: _filled(trees, "log_q", math.nan))),
    "more than certain": ("propose", _changed(lambda trees: _filled(trees, "log_q", 100.0))),
    "unknown tokens": ("propose", _changed(lambda trees: _filled(trees, "token_ids", 1 << 20))),
    "tokens below zero": ("propose", _changed(lambda trees: _filled(trees, "token_ids", -7))),
    "another type": ("propose", _changed(lambda trees: replace(trees, token_ids=trees.token_ids.astype(np.int64)))),
    "an unknown source": ("propose", _changed(lambda trees: _filled(trees, "source", 99))),
    "requests beyond the nodes": ("propose", _changed(lambda trees: _filled(trees, "node_start", 1 << 20))),
}
"""fault -> the method in which it shows, and what that method does: raises, or answers."""

HARMLESS = ("lies",)
"""Faults for which nobody is switched off."""
_METHODS = ("propose", "observe", "admit", "finish", "forget")


class Broken(TreeByTree):
    """Drafts soundly until it is told of a fault, and commits that from then on.

    Args:
        sound: what it drafts with meanwhile.
    """

    def __init__(self, sound: Knowing, name: str = "broken") -> None:
        self.name, self._sound, self.source, self.vocab_size = name, sound, sound.source, sound.vocab_size
        self.rng = sound.rng
        self.fault, self.num_asked = "", 0

    def recover(self) -> None:
        """It is well again by itself."""
        self.fault = ""
        for name in _METHODS:
            self.__dict__.pop(name, None)

    def break_by(self, fault: str) -> None:
        self.fault = fault
        method, does = DRAFTER_FAULTS[fault]
        for name in _METHODS if method == "every method" else (method,):
            setattr(self, name, does if does in (_raises, _leaves, _is_gone) else self._bound(does))

    def _bound(self, does: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: does(self, *args)

    def sound(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        return self._sound.propose(batch, limits)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.num_asked += 1
        return self.sound(batch, limits)

    # told, as drafters with something to keep are
    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        assert len(result.num_accepted) == trees.num_requests


class Deaf(Listener):
    """Fails at whatever it is told, failures included."""

    def _fails(self, *_: Any) -> NoReturn:
        raise RuntimeError("a mistake")

    admitted = planned = paused = stepped = finished = failed = drafters_alive = closed = _fails


class Errs(FixedBudget):
    """A budget that makes mistakes, once it is told to."""

    METHODS = ("limits", "choose", "observe", "finish", "steps_off")

    def break_by(self, method: str) -> None:
        setattr(self, method, _raises)


class Reckless(FixedBudget):
    """Chooses more than anybody has room for."""

    def choose(self, proposals: Any, limits: DraftLimits, batch: RequestBatch, draft_ms: float) -> StepPlan:
        return StepPlan(batch_of([chain([0] * 60)] * batch.size, batch.request_ids), "reckless")


def drawn(chance: random.Random) -> tuple[str, str]:
    """What breaks, and how: a `drafter` and its fault, or a `budget` and the method that fails, or none: it is
    reckless."""
    if chance.random() < 0.15:
        return "budget", chance.choice(Errs.METHODS) if chance.random() < 0.7 else ""
    return "drafter", chance.choice(list(DRAFTER_FAULTS))
