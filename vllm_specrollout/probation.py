"""What of ours has failed, when it is tried again, and what it has missed meanwhile. Pure.

What belongs here: patience, counted in engine steps. Who is asked, and how a failure is contained, is in contained.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm_specrollout.types import EMPTY_TREE, FinishedRequest, RequestView

MOST_FAILURES = 5
"""What fails so often is given up."""
FIRST_PATIENCE, LONGER = 64, 4
"""Engine steps without what has failed once; each further time so many times as many."""
RECOVERED = 4096
"""Steps after which earlier failures count no more: what fails once a day is not given up."""
MOST_MISSED = 1024
"""Endings that are kept for what is on probation; of more, the oldest answers are lost to it."""
NEVER = 1 << 60
"""A step that no engine comes to."""
_MOST_GONE = 65_536
_MOST_TEXT = 200
_NO_TOKENS = EMPTY_TREE.token_ids


class _Told(Protocol):
    """A drafter; or a budget, which hears of endings alone."""

    def finish(self, ending: FinishedRequest) -> None: ...


@dataclass(slots=True)
class Missed:
    """What a part was not told while it was on probation, so that nothing of it is left behind in the part."""

    endings: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=MOST_MISSED))
    # requests that it knows and that are over, in the order of their ends; and how, without their answers, which are
    # lost where too many have ended. None: not over, but preempted
    gone: dict[str, FinishedRequest | None] = field(default_factory=dict)
    # requests that have come and still run
    come: dict[str, RequestView] = field(default_factory=dict)

    def admit(self, view: RequestView) -> None:
        # the runner's buffer is another request's by the time this is told
        self.come[view.request_id] = replace(view, token_ids=view.token_ids.copy())

    def finish(self, ending: FinishedRequest) -> None:
        self.endings.append(ending)
        if ending.request_id in self.gone or ending.request_id not in self.come:
            self._go(ending.request_id, replace(ending, prompt_ids=_NO_TOKENS, token_ids=_NO_TOKENS))

    def forget(self, request_id: str) -> None:
        if self.come.pop(request_id, None) is None and request_id not in self.gone:
            self._go(request_id, None)

    def _go(self, request_id: str, ending: FinishedRequest | None) -> None:
        if len(self.gone) < _MOST_GONE or request_id in self.gone:
            self.gone[request_id] = ending

    def tell_budget(self, budget: _Told) -> None:
        """Requests that ended without a token are none of its."""
        while self.endings:
            if len((ending := self.endings.popleft()).token_ids):
                budget.finish(ending)

    def tell(self, drafter: Any) -> None:
        """Endings before they are forgotten, as always. What it fails at is not told again, and all else is."""
        while self.endings:
            ending = self.endings.popleft()
            if (known := self.gone.get(ending.request_id)) is not None:
                # it has its answer with it
                self.gone[known.request_id] = None
            drafter.finish(ending)
        while self.gone:
            request_id = next(iter(self.gone))
            ending_only = self.gone[request_id]
            if ending_only is not None:
                self.gone[request_id] = None
                drafter.finish(ending_only)
            del self.gone[request_id]
            drafter.forget(request_id)
        while self.come:
            drafter.admit(self.come.pop(next(iter(self.come))))


@dataclass(slots=True)
class Record:
    """What is known of a part that has failed."""

    # kept, so that its identity is not another's
    part: Any
    failures: int = 0
    # first step in which it is asked again
    until: int = 0
    error: str = ""


class Probation:
    """Parts that have failed, by their identity."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self.out: dict[int, Missed] = {}
        """Those that are not asked now but will be again."""
        self.next_due = NEVER
        """First step in which one of them is."""
        self.given_up: dict[str, tuple[int, str]] = {}
        """Name -> how often it failed, and how the last time."""

    def failed(
        self,
        part: Any,
        name: str,
        error: BaseException,
        step: int,
        *,
        for_good: bool = False,
        missed: Missed | None = None,
    ) -> int:
        """A part has failed in this step.

        Args:
            missed: what it is still to be told, where it failed at being told what it missed.

        Returns:
            steps that it is left alone for; 0: it is given up.
        """
        record = self._records.setdefault(id(part), Record(part))
        if record.failures and step - record.until >= RECOVERED:
            record.failures = 0
        record.failures += 1
        record.error = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        if for_good or record.failures >= MOST_FAILURES:
            self.given_up[name] = record.failures, record.error
            self.forget([part])
            return 0
        patience = FIRST_PATIENCE * LONGER ** (record.failures - 1)
        record.until = step + 1 + patience
        self.out[id(part)] = Missed() if missed is None else missed
        self._plan()
        return patience

    def due(self, step: int) -> list[tuple[Any, Missed]]:
        """The parts that are tried again from this step on, and what they missed; they are on probation no more."""
        found = [self._records[key] for key in self.out if self._records[key].until <= step]
        missed = [(record.part, self.out.pop(id(record.part))) for record in found]
        self._plan()
        return missed

    def steps_left(self, part: Any, step: int) -> int:
        """How many steps from this one on it is left alone; 0: it is asked."""
        return max(self._records[id(part)].until - step, 0) if id(part) in self.out else 0

    def history(self, part: Any) -> tuple[int, str]:
        """How often it failed lately, and how the last time."""
        record = self._records.get(id(part))
        return (0, "") if record is None else (record.failures, record.error)

    def waiting(self) -> list[Any]:
        """The parts on probation."""
        return [self._records[key].part for key in self.out]

    def forget(self, parts: Iterable[Any]) -> None:
        """Nobody will ask these any more."""
        for part in parts:
            self._records.pop(id(part), None)
            self.out.pop(id(part), None)
        self._plan()

    def _plan(self) -> None:
        self.next_due = min((self._records[key].until for key in self.out), default=NEVER)
