"""Probation: what of ours has failed, and when it is asked again. Pure.

What belongs here: patience, counted in engine steps. Who is asked, and how a failure is contained, is in contained.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_FAILURES = 5
"""Failures after which a drafter is given up."""
FIRST_PATIENCE, LONGER = 64, 4
"""Engine steps without what has failed once; each further time so many times as many."""
RECOVERED = 4096
"""Steps after which earlier failures count no more: what fails once a day is not given up."""
NEVER = 1 << 60
"""A step that no engine comes to."""
_MOST_TEXT = 200


@dataclass(slots=True)
class FailureRecord:
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
        self._records: dict[int, FailureRecord] = {}
        self.out: set[int] = set()
        """Those that are not asked now but will be again."""
        self.next_due = NEVER
        """First step in which one of them is."""
        self.given_up: dict[str, tuple[int, str]] = {}
        """Name -> how often it failed, and how the last time."""

    def failed(self, part: Any, name: str, error: BaseException, step: int, *, for_good: bool = False) -> int:
        """A part has failed in this step.

        Returns:
            steps that it is left alone for; 0: it is given up.
        """
        record = self._records.setdefault(id(part), FailureRecord(part))
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
        self.out.add(id(part))
        self._plan()
        return patience

    def due(self, step: int) -> list[Any]:
        """The parts that are asked again from this step on; they are on probation no more."""
        found = [self._records[key].part for key in self.out if self._records[key].until <= step]
        self.out.difference_update(map(id, found))
        self._plan()
        return found

    def steps_left(self, part: Any, step: int) -> int:
        """How many steps from this one on it is left alone; 0: it is asked."""
        return max(self._records[id(part)].until - step, 0) if id(part) in self.out else 0

    def history(self, part: Any) -> tuple[int, str]:
        """How often it failed lately, and how the last time."""
        record = self._records.get(id(part))
        return (0, "") if record is None else (record.failures, record.error)

    def forget(self, parts: Iterable[Any]) -> None:
        """Nobody will ask these any more."""
        for part in parts:
            self._records.pop(id(part), None)
            self.out.discard(id(part))
        self._plan()

    def _plan(self) -> None:
        self.next_due = min((self._records[key].until for key in self.out), default=NEVER)
