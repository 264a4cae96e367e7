"""Ending of a process of ours: by SIGTERM, from whoever began it, or with that process."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """From now on the kernel kills this process, even one that hangs, when the thread ends that began it.

    For processes which leave nothing behind, begun by a thread that lives as long as its process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)  # it went before it was asked for


class Ending:
    """From its making on, SIGTERM ends the process: at once while it starts, and between two turns once it works.

    Within a turn nothing is raised: what a drafter raises is contained there, this as well, and the process would stay.
    """

    def __init__(self) -> None:
        self._is_working = False
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._take)

    def wait_for_turn(self) -> None:
        """From now on SIGTERM only sets `is_asked`: whoever has this asks it between two turns."""
        self._is_working = True

    def _take(self, *_: object) -> None:
        self.is_asked = True
        if not self._is_working:
            raise SystemExit(0)
