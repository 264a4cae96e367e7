"""Drafters, budget and listeners of one engine, as far as they may fail. Pure.

What belongs here: who is asked, and what happens when one of them fails: it goes on probation (probation.py), and the
step goes on without it. When a step asks whom is in speculator.py; nothing here is entered in a step that goes well.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.fixed import OffBudget
from vllm_specrollout.budgets.step_cost import Asking
from vllm_specrollout.budgets.worth import Worth
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.guard import CONTAINED, Guard
from vllm_specrollout.late import LateAnswers
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.own_thread import OnThread
from vllm_specrollout.probation import Missed, Probation

logger = logging.getLogger("vllm.specrollout")

RESTS = "the budget failed"
"""Why steps go without drafts while the budget is on probation."""
UNWATCHED = "metrics, a timeline or a recording lack a step"
"""What comes of a listener that fails."""
_BUDGET = "budget"
_CLOSING_S = 10.0
"""Given to what was given up, to close its files, when the engine ends."""


class Contained:
    """What of an engine's drafting may fail, none of which can hurt the engine.

    Args:
        guard: names and counts failures; default: as strict as the environment says.
        time_share: of what the rest of a step takes, so much may each drafter take.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        budget: Budget,
        guard: Guard | None,
        listeners: Sequence[Listener],
        time_share: float,
        clock: Callable[[], float],
    ) -> None:
        self.guard = guard if guard is not None else Guard()
        self.listeners = list(listeners)
        self.probation = Probation()
        self._clock = clock
        self._late = LateAnswers()
        # what then happens depends on the clock, and must not where failures are raised
        self._asking, self.worth = Asking(math.inf if self.guard.is_strict else time_share), Worth()
        self.drafters: list[Drafter] = []
        """Those that are asked; who is on probation is not among them."""
        # by their index in the list that they were given in: what `source` and `DraftLimits.drafters` count by
        self._sources: dict[int, int] = {}
        self._names: list[str] = []
        self.budget = budget
        self._step = 0
        self._closing: list[threading.Thread] = []
        self.replace_drafters(drafters)

    def replace_drafters(self, drafters: Iterable[Drafter]) -> None:
        """Draft with these from now on."""
        before = [*self.drafters, *(part for part in self.probation.waiting() if part is not self.budget)]
        self.drafters = [self._on_own_thread(drafter) for drafter in drafters]
        self._sources = {id(drafter): source for source, drafter in enumerate(self.drafters)}
        self._names = [drafter.name for drafter in self.drafters]
        self.probation.forget(before)
        for gone in before:
            if id(gone) not in self._sources:
                self._late.drop(gone)
                self._stopped(gone)
        self._tell_alive()

    def _on_own_thread(self, drafter: Drafter) -> Drafter:
        is_asked_here = not drafter.may_block or isinstance(drafter, OnThread)
        return drafter if is_asked_here else OnThread(drafter, lambda size: self._asking.limit_ms(size), self._clock)

    def draft_with(self, drafters: Iterable[Drafter]) -> None:
        """Draft with these alone, of those that were given; their sources stay."""
        chosen = list(drafters)
        self.drafters = [drafter for drafter in chosen if id(drafter) not in self.probation.out]
        others = [part for part in self.probation.waiting() if part not in [*chosen, self.budget]]
        self.probation.forget(others)  # they do not come back by themselves
        self._tell_alive()

    def all_drafters(self) -> list[Drafter]:
        """Those that are asked and those on probation, by their sources."""
        out = [part for part in self.probation.waiting() if id(part) in self._sources]
        return sorted([*self.drafters, *out], key=lambda drafter: self._sources[id(drafter)])

    def _missed(self, what: Callable[[Missed], None]) -> None:
        """Keep for those on probation what they are not told now; before the others are told, who may fail at it."""
        for missed in self.probation.out.values():
            what(missed)

    # --- failures ----------------------------------------------------------------------------------------------------

    def drop(self, drafter: Drafter, error: BaseException) -> None:
        """A drafter has failed, and is asked no more."""
        self._failed(drafter, error, for_good=True)

    def _budget_failed(self, error: BaseException) -> None:
        left_alone = self.probation.failed(self.budget, _BUDGET, error, self._step)
        if not left_alone:
            self.budget = OffBudget()
        self.guard.failed(_BUDGET, error, "drafting is off" + _until(left_alone), is_last=not left_alone)

    def _failed(self, drafter: Drafter, error: BaseException, *, for_good: bool = False) -> None:
        name = f"drafter {drafter.name}"
        self.drafters = [d for d in self.drafters if d is not drafter]
        self._late.drop(drafter)
        self.worth.drop(drafter.name)
        for_good = for_good or drafter.is_in_step
        left_alone = self.probation.failed(drafter, drafter.name, error, self._step, for_good=for_good)
        if not left_alone:
            # what it has open may be what it failed at
            closing = threading.Thread(target=self._close, args=(drafter,), name="specrollout-closing", daemon=True)
            closing.start()
            self._closing.append(closing)
        self._tell_alive()
        effect = "requests go on without its drafts" + _until(left_alone)
        self.guard.failed(name, error, effect, is_last=not left_alone)

    def _close(self, drafter: Drafter) -> None:
        try:
            drafter.close()
        except CONTAINED:
            logger.exception("Spec rollout: drafter %s was given up, and could not be closed", drafter.name)

    def _close_drafters(self) -> None:
        """The engine ends: threads do, and what was given up has its chance to be on disk."""
        for drafter in self.all_drafters():
            self._stopped(drafter)
        for closing in self._closing:
            closing.join(_CLOSING_S)

    def _stopped(self, drafter: Drafter) -> None:
        if isinstance(drafter, OnThread):
            drafter.stop()

    def _try_again(self, step: int) -> None:
        """Parts whose time has come are told what they missed, and asked again."""
        for part, missed in self.probation.due(step):
            if part is self.budget:
                try:
                    missed.tell_budget(part)
                except CONTAINED as error:
                    self._budget_failed(error)
            elif id(part) in self._sources:
                self.drafters = sorted([*self.drafters, part], key=lambda drafter: self._sources[id(drafter)])
                self._tell_alive()
                try:
                    missed.tell(part)
                except CONTAINED as error:
                    self._failed(part, error)

    def _tell_alive(self) -> None:
        for listener in self.listeners:
            with self.guard.over("watching", UNWATCHED):
                listener.drafters_alive(len(self.drafters))

    def health(self) -> dict[str, Any]:
        """How drafters and budget are, in plain JSON types: name -> "state" (`alive`, `probation`, `given up`), how
        many times they "failed", the last "error", and "steps" until they are tried again."""
        parts: Iterable[tuple[str, Any]] = ((drafter.name, drafter) for drafter in self.all_drafters())
        found = {}
        for name, part in itertools.chain(parts, [(_BUDGET, self.budget)]):
            failed, error = self.probation.history(part)
            steps = self.probation.steps_left(part, self._step)
            found[name] = {"state": "probation" if steps else "alive", "failed": failed, "error": error, "steps": steps}
        for name, (failed, error) in self.probation.given_up.items():
            if name in self._names or name == _BUDGET:
                found[name] = {"state": "given up", "failed": failed, "error": error, "steps": 0}
        return {_BUDGET: found.pop(_BUDGET), "drafters": found}


def _until(steps: int) -> str:
    return f"; it is tried again in {steps} steps" if steps else "; it is given up"
