"""The walk through all steps: what is left of each part is measured in a child, row by row, while there is time.

Whatever becomes of a child, this process learns of it in time and goes on.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runner import leash
from . import machine
from .record import Part, Record, Row, Task

_TAIL_BYTES = 6 << 10
_END_S, _STACKS_S = 5.0, 1.0


class ChildFailed(Exception):
    """The child said what went wrong, died or took too long."""

    def __init__(self, cause: str, trace: str) -> None:
        super().__init__(cause)
        self.cause, self.trace = cause, trace


class Child:
    """A process for some rows of a part; a context manager, at whose end it and all that it started are gone.

    Args:
        log: file that its output is added to.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._log, self._environment = log, environment
        # nothing more is to be expected of it
        self.is_lost = False
        # -P: not this process's folder, which may be a checkout; a segmentation fault then says where
        program = ["-P", "-X", "faulthandler", "-c", f"from {__package__}.child import main; main()"]
        with log.open("ab") as output:
            self._log_begin = output.tell()
            self._process, self._pipe, self._leash = leash.start(program, environment, output)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self.is_lost:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        # engines have groups of their own, with leashes held by the child
        self._leash.end()
        self._process.wait()
        self._pipe.close()

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """What it answers: nothing to the part, once it is set up; then a row's values to the row's parameters.

        Raises:
            ChildFailed: an error, or nothing within the limit.
        """
        self.is_lost = True
        with contextlib.suppress(OSError):  # it died, which the answer will say
            self._pipe.send(message)
        try:
            if not self._pipe.poll(max(0.0, limit_s)):
                # it and its engines write down where they are
                machine.ask_where({self._process.pid, *machine.marked_like(self._environment)})
                time.sleep(_STACKS_S)
                raise ChildFailed(f"no answer within {limit_s:.0f} s", self._tail())
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ChildFailed(self._end(), self._tail()) from None
        self.is_lost = "error" in answer and answer.get("is_lost", True)
        if "error" in answer:
            raise ChildFailed(answer["error"], answer["trace"])
        return answer["values"]

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.poll()
        if code is None:
            return "its process closed the pipe"
        return f"its process died of {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"

    def _tail(self) -> str:
        return self._log.read_bytes()[self._log_begin :][-_TAIL_BYTES:].decode(errors="replace")


class _OutOfTime(Exception):
    """What is left of this start is not enough for this part; a shorter one may yet fit."""


@dataclass
class Walk:
    """One start's way through the parts."""

    record: Record
    # `time.monotonic()` at which the last row must have ended
    until: float
    # of the children
    environment: Mapping[str, str]
    log: Path
    # is told what happens
    say: Callable[[str], None]
    # called when a process is gone, and when a part is over in which one ran
    after_child: Callable[[], None]
    after_part: Callable[[], None]
    # keys of rows: trying one again at once would end the same way
    _tried: set[str] = field(default_factory=set)
    # processes lost since the last row that was measured
    _failures: int = 0

    def run(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if self._measure_part(part):
                self.after_part()

    def _left(self) -> float:
        return self.until - time.monotonic()

    def _need(self, seconds: float, title: str) -> None:
        if self._left() < seconds:
            raise _OutOfTime(f"{title}: no time left for it")

    def _measure_part(self, part: Part) -> bool:
        """Measure what is left of it; whether anything ran."""
        self._failures, has_run = 0, False
        try:
            while todo := self._todo(part):
                if self._failures == part.patience:
                    self.record.notes.append(f"{part.title}: given up after {part.patience} failures in a row")
                    break
                self._need(part.expected_s + todo[0][0].expected_s, part.title)
                has_run = True
                try:
                    self._measure_in_child(part, todo)
                finally:
                    self.after_child()
        except _OutOfTime as reason:
            self.say(str(reason))
        return has_run

    def _todo(self, part: Part) -> list[tuple[Task, Row]]:
        """What is left of it and was not tried in this start."""
        rows = [(task, self.record.row(part, task)) for task in part.tasks]
        return [(task, row) for task, row in rows if row.may_begin and row.key not in self._tried]

    def _measure_in_child(self, part: Part, todo: Sequence[tuple[Task, Row]]) -> None:
        """Measure these rows in one process, until it is lost."""
        self.say(f"{part.title}: starting")
        begin = time.monotonic()
        environment = {**self.environment, **part.environment}
        with Child(environment, self.log) as child:
            try:
                message = {"runner": part.runner, "setup": part.setup, "rows": [task.params for task, _ in todo]}
                child.ask(message, min(part.limit_s, self._left()))
            except ChildFailed as failure:
                self._need(0, f"{part.title}, while it started")
                # no row was under way; the next one pays, or this would never end
                self._begin(todo[0][1])
                failure.cause = f"while it started: {failure.cause}"
                self._fail(todo[0][1], failure, begin)
            else:
                self.say(f"{part.title}: ready after {time.monotonic() - begin:.0f} s")
                for task, row in todo:
                    self._measure_row(child, task, row, f"{part.title}, {task.name}")
                    if child.is_lost:
                        break
            self._failures += child.is_lost

    def _measure_row(self, child: Child, task: Task, row: Row, title: str) -> None:
        self._need(task.expected_s, title)
        begin = time.monotonic()
        self._begin(row)
        try:
            values = child.ask(task.params, min(task.limit_s, self._left()))
        except ChildFailed as failure:
            # out of time, it stays as it was begun
            self._need(0, title)
            self._fail(row, failure, begin)
            return
        self.record.end(row, values, time.monotonic() - begin)
        self._failures = 0
        self.say(f"{title}: {_VERDICTS[row.is_right]}, {row.seconds:.1f} s")

    def _begin(self, row: Row) -> None:
        self._tried.add(row.key)
        self.record.begin(row)

    def _fail(self, row: Row, failure: ChildFailed, begin: float) -> None:
        self.record.fail(row, failure.cause, failure.trace, time.monotonic() - begin)
        self.say(f"{row.step}, {row.name}: FAILED: {(failure.cause.splitlines() or ['?'])[0][:300]}")


_VERDICTS = {None: "done", True: "right", False: "WRONG"}
