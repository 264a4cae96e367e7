"""The parent's side of a part's process: whatever becomes of it, the parent learns of it in time and goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ..runner.leash import Leash
from . import machine
from .tasks import Part

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
        rows: parameters of the rows that it will be asked for.
        log: file that its output is added to.
    """

    def __init__(
        self, part: Part, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, str], log: Path
    ) -> None:
        self._log, self._environment = log, environment
        # nothing more is to be expected of it
        self.is_lost = False
        self._log_begin = log.stat().st_size if log.exists() else 0
        self._pipe, child_end = Pipe()
        descriptor = child_end.fileno()
        with log.open("ab") as output:
            # -P: not this process's folder, which may be a checkout; a segmentation fault then says where
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-m", f"{__package__}.child", str(descriptor)],
                env=dict(environment),
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            child_end.close()
            self._leash = Leash(self._process.pid)
            with contextlib.suppress(OSError):  # it died at once, which the first answer will say
                self._pipe.send({"runner": part.runner, "setup": dict(part.setup), "rows": [dict(row) for row in rows]})
        except BaseException:
            # a signal, just now: nobody would end it
            self._process.kill()
            raise

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

    def wait_until_ready(self, limit_s: float) -> None:
        """Wait for its setup.

        Raises:
            ChildFailed: it failed, or took longer.
        """
        self._answer(limit_s)

    def measure(self, params: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """One row's values.

        Raises:
            ChildFailed: there are none, or not within the limit.
        """
        with contextlib.suppress(OSError):
            self._pipe.send(dict(params))
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        self.is_lost = True
        try:
            if not self._pipe.poll(max(0.0, limit_s)):
                # it and its engines write down where they are
                machine.ask_where({self._process.pid, *machine.marked_like(self._environment)})
                time.sleep(_STACKS_S)
                raise ChildFailed(f"no answer within {limit_s:.0f} s", self._tail())
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ChildFailed(self._end(), self._tail()) from None
        if "error" in answer:
            self.is_lost = answer.get("is_lost", True)
            raise ChildFailed(answer["error"], answer["trace"])
        self.is_lost = False
        return answer["values"]

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.poll()
        if code is None:
            return "its process closed the pipe"
        return f"its process died of {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"

    def _tail(self) -> str:
        with self._log.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(max(self._log_begin, end - _TAIL_BYTES))
            return handle.read().decode(errors="replace")
