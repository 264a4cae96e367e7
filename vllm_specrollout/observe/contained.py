"""Drafters, budget and listeners of one engine, as far as they may fail. Pure.

What belongs here: who is asked, and what happens when one of them fails: it goes on probation (probation.py), and the
step goes on without it. It is told of requests all the same, so nothing of them is left behind in it. When a step asks
whom is in speculator.py; nothing here is entered in a step that goes well.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.fixed import OffBudget
from vllm_specrollout.budgets.step_cost import Asking
from vllm_specrollout.budgets.worth import Worth
from vllm_specrollout.drafters.base import UNBOUNDED, Drafter
from vllm_specrollout.errors import logger
from vllm_specrollout.observe.guard import CONTAINED, Guard
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.probation import Probation

RESTS = "the budget failed"
"""Why steps go without drafts while the budget is on probation."""
_BUDGET = "budget"
_STILL = "it is on probation already"
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
        # what then happens depends on the clock, and must not where failures are raised
        self._asking, self.worth = Asking(math.inf if self.guard.is_strict else time_share), Worth()
        self.drafters: list[Drafter] = []
        """Those that are asked; who is on probation or rests is not among them."""
        self.names: list[str] = []
        """Of all drafters, by their sources; also of those that were given up."""
        # all that were not given up; and by their index in the list that they were given in: what `source` and
        # `DraftLimits.drafters` count by. By their identity
        self._known: dict[int, Drafter] = {}
        self._sources: dict[int, int] = {}
        # told of requests: also those on probation, since they would keep what is over
        self._told: list[Drafter] = []
        self.budget = budget
        # in the place of a budget that was given up
        self._no_budget: Budget | None = None
        self._step = 0
        self._closing: list[threading.Thread] = []
        self.replace_drafters(drafters)

    def replace_drafters(self, drafters: Iterable[Drafter]) -> None:
        """Draft with these from now on. Who was there and is on probation stays on it."""
        given = list(drafters)
        self.names = [drafter.name for drafter in given]
        self._give(dict(enumerate(given)))

    def replace_one(self, source: int, drafter: Drafter) -> None:
        """Draft with this one in the place of that source's; the others stay as they are, with their sources."""
        self.names[source] = drafter.name
        self._give({**{self._sources[key]: one for key, one in self._known.items()}, source: drafter})

    def _give(self, given: Mapping[int, Drafter]) -> None:
        """Args:
        given: all drafters, by their sources.
        """
        before = self._known
        self._known = {id(given[source]): given[source] for source in sorted(given)}
        self._sources = {id(drafter): source for source, drafter in given.items()}
        self.probation.forget([drafter for key, drafter in before.items() if key not in self._known])
        for key, drafter in self._known.items():
            if key not in before:
                # another one of that name
                self.probation.given_up.pop(drafter.name, None)
        self._choose()

    def _choose(self) -> None:
        """Who is told and who is asked, when that may have changed; in new lists, since somebody may be in the old."""
        self._told = list(self._known.values())
        self.drafters = [drafter for drafter in self._told if id(drafter) not in self.probation.out]
        self._tell(lambda listener: listener.drafters_alive(len(self.drafters)))

    def all_drafters(self) -> list[Drafter]:
        """Those that are asked and those on probation, by their sources."""
        return list(self._told)

    # --- failures ----------------------------------------------------------------------------------------------------

    def drop(self, drafter: Drafter, error: BaseException) -> None:
        """A drafter has failed, and is asked no more."""
        self.failed(drafter, error, for_good=True)

    def renewed(self, drafter: Drafter) -> None:
        """Its weights are others: what failed before counts no more."""
        self.probation.forget([drafter])
        self._choose()

    def _budget_failed(self, error: BaseException) -> None:
        if id(self.budget) in self.probation.out:
            self.guard.failed(_BUDGET, error, _STILL)
            return
        left_alone = self.probation.failed(self.budget, _BUDGET, error, self._step)
        if not left_alone:
            self.budget = self._no_budget = OffBudget()
        self.guard.failed(_BUDGET, error, "drafting is off" + _until(left_alone), is_last=not left_alone)

    def failed(self, drafter: Drafter, error: BaseException, *, for_good: bool = False) -> None:
        """It is on probation now, or given up."""
        name = f"drafter {drafter.name}"
        if id(drafter) in self.probation.out and not for_good:
            # at being told of a request: it is asked for nothing as it is, and its next failure when asked counts
            self.guard.failed(name, error, _STILL)
            return
        self.worth.drop(drafter.name)
        for_good = for_good or drafter.is_on_ranks
        left_alone = self.probation.failed(drafter, drafter.name, error, self._step, for_good=for_good)
        if not left_alone:
            self._known.pop(id(drafter), None)
            # what it has open may be what it failed at
            closing = threading.Thread(target=self._close, args=(drafter,), name="specrollout-closing", daemon=True)
            closing.start()
            self._closing.append(closing)
        self._choose()
        effect = "requests go on without its drafts" + _until(left_alone)
        self.guard.failed(name, error, effect, is_last=not left_alone)

    def _close(self, drafter: Drafter) -> None:
        try:
            drafter.close()
        except CONTAINED:
            logger.exception("Spec rollout: drafter %s was given up, and could not be closed", drafter.name)

    def _close_drafters(self) -> None:
        """The engine ends: what was given up has its chance to be on disk."""
        for closing in self._closing:
            closing.join(_CLOSING_S)

    def _try_again(self, step: int) -> None:
        """Parts whose time has come are asked again."""
        self.probation.due(step)
        self._choose()

    def _tell(self, what: Callable[[Listener], None]) -> None:
        """Tell all who watch; the speculator's, since it is entered in every step."""
        raise NotImplementedError

    def health(self) -> dict[str, Any]:
        """How drafters and budget are, in plain JSON types: name -> "state" (`alive`, `probation`, `given up`), how
        many times they "failed", the last "error", and "steps" until they are tried again; of a drafter whose context
        is shorter than the target's, "most_tokens" of a request that it drafts for; of a model, its "head"."""
        parts: Iterable[tuple[str, Any]] = ((drafter.name, drafter) for drafter in self.all_drafters())
        found = {}
        for name, part in itertools.chain(parts, [(_BUDGET, self.budget)]):
            failed, error = self.probation.history(part)
            steps = self.probation.steps_left(part, self._step)
            found[name] = {"state": "probation" if steps else "alive", "failed": failed, "error": error, "steps": steps}
            if (most := getattr(part, "most_tokens", UNBOUNDED)) < UNBOUNDED:
                found[name]["most_tokens"] = most
            if (heads := getattr(part, "heads", None)) is not None:
                found[name]["head"] = heads.as_dict()
        for name, (failed, error) in self.probation.given_up.items():
            if self.budget is self._no_budget if name == _BUDGET else name in self.names:
                found[name] = {"state": "given up", "failed": failed, "error": error, "steps": 0}
        return {_BUDGET: found.pop(_BUDGET), "drafters": found}


def _until(steps: int) -> str:
    return f"; it is tried again in {steps} steps" if steps else "; it is given up"
