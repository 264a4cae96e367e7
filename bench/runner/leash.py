"""Processes with a pipe to them, and a group of their own that ends when this process is gone, however it goes.

A group of its own keeps Ctrl-C and a deadline's signals apart from the processes above it; for the same reason it would
outlive them. `PR_SET_PDEATHSIG` is no way out: it is tied to a thread, and not inherited by what an engine forks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# in a session of its own, or what ends this process's group would end the guard with it
_GUARD = 'cat >/dev/null; kill -KILL "-$1" 2>/dev/null'


class Leash:
    """Held by this process over a group of others."""

    def __init__(self, group: int) -> None:
        self._group = group
        end, self._held = os.pipe()
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "leash", str(group)],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(end)

    def end(self) -> None:
        """Kill what is left of the group, and let go."""
        if self._held < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        self.release()

    def release(self) -> None:
        """Let go; the group may live on, and its number may be given to others."""
        if self._held < 0:
            return
        # first the guard: it must not see the pipe close
        self._guard.kill()
        self._guard.wait()
        os.close(self._held)
        self._held = -1


def spawn(
    program: Sequence[str],
    environment: Mapping[str, str],
    output: Any,
    pass_fds: Sequence[int] = (),
    error: Any = None,
) -> tuple[subprocess.Popen[bytes], Leash]:
    """Run Python in a session of its own, so that Ctrl-C does not reach it.

    Args:
        program: Python's arguments.
        output: file for its outputs.
        error: one of its own for standard error.
    """
    process = subprocess.Popen(
        [sys.executable, *program],
        env=dict(environment),
        pass_fds=list(pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if error is None else error,
        start_new_session=True,
    )
    try:
        return process, Leash(process.pid)
    except BaseException:
        # a signal, just now: nobody would end it
        process.kill()
        raise
