"""The walk through all steps: what is left of each part is measured in a child, row by row, while there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .children import Child, ChildFailed
from .record import Record, Row
from .tasks import Part, Task

Say = Callable[[str], None]


class _OutOfTime(Exception):
    """What is left of this start is not enough for this part; a shorter one may yet fit."""


class Walk:
    """One start's way through the parts.

    Args:
        until: `time.monotonic()` at which the last row must have ended; None: never.
        environment, log: of the children.
        say: is told what happens.
        after_child, after_part: called when a process is gone, and when a part is over in which one ran.
    """

    def __init__(
        self,
        record: Record,
        *,
        until: float | None,
        environment: Mapping[str, str],
        log: Path,
        say: Say,
        after_child: Callable[[], None],
        after_part: Callable[[], None],
    ) -> None:
        self._record, self._until = record, until
        self._environment, self._log = environment, log
        self._say, self._after_child, self._after_part = say, after_child, after_part
        # processes lost since the last row that was measured
        self._failures = 0
        # keys of rows
        self._tried: set[str] = set()

    def run(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if self._part(part):
                self._after_part()

    def _left(self) -> float:
        return float("inf") if self._until is None else self._until - time.monotonic()

    def _need(self, seconds: float, title: str) -> None:
        if self._left() < seconds:
            raise _OutOfTime(f"{title}: no time left for it")

    def _part(self, part: Part) -> bool:
        """Measure what is left of it; whether anything ran."""
        self._failures, has_run = 0, False
        try:
            while todo := self._todo(part):
                if self._failures == part.patience:
                    self._record.notes.append(f"{part.title}: given up after {part.patience} failures in a row")
                    break
                self._need(part.expected_s + todo[0][0].expected_s, part.title)
                has_run = True
                try:
                    self._child(part, todo)
                finally:
                    self._after_child()
        except _OutOfTime as reason:
            self._say(str(reason))
        return has_run

    def _todo(self, part: Part) -> list[tuple[Task, Row]]:
        """What is left of it and was not tried in this start: trying again at once would end the same way."""
        rows = [(task, self._record.row(part, task)) for task in part.tasks]
        return [(task, row) for task, row in rows if row.may_begin and row.key not in self._tried]

    def _child(self, part: Part, todo: Sequence[tuple[Task, Row]]) -> None:
        """Measure these rows in one process, until it is lost."""
        self._say(f"{part.title}: starting")
        begin = time.monotonic()
        environment = {**self._environment, **part.environment}
        with Child(part, [task.params for task, _ in todo], environment, self._log) as child:
            try:
                child.wait_until_ready(min(part.limit_s, self._left()))
            except ChildFailed as failure:
                self._need(0, f"{part.title}, while it started")
                # no row was under way; the next one pays, or this would never end
                self._begin(todo[0][1])
                self._fail(todo[0][1], f"while it started: {failure.cause}", failure.trace, begin)
                self._failures += 1
                return
            self._say(f"{part.title}: ready after {time.monotonic() - begin:.0f} s")
            for task, row in todo:
                title = f"{part.title}, {task.name}"
                self._need(task.expected_s, title)
                begin = time.monotonic()
                self._begin(row)
                try:
                    values = child.measure(task.params, min(task.limit_s, self._left()))
                except ChildFailed as failure:
                    # it stays as it was begun
                    self._need(0, title)
                    self._fail(row, failure.cause, failure.trace, begin)
                    if child.is_lost:
                        self._failures += 1
                        return
                    continue
                self._record.end(row, values, time.monotonic() - begin)
                self._failures = 0
                self._say(f"{title}: {_verdict(row)}")

    def _begin(self, row: Row) -> None:
        self._tried.add(row.key)
        self._record.begin(row)

    def _fail(self, row: Row, cause: str, trace: str, begin: float) -> None:
        self._record.fail(row, cause, trace, time.monotonic() - begin)
        self._say(f"{row.step}, {row.name}: FAILED: {(cause.splitlines() or ['?'])[0][:300]}")


def _verdict(row: Row) -> str:
    right = {None: "done", True: "right", False: "WRONG"}[row.is_right]
    return f"{right}, {row.seconds:.1f} s"
