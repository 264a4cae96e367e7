"""Leftovers of processes that were killed, removed by whoever begins the next ones: sockets and shared memory.

What has a process id in its name is removed once nobody has that id. Shared memory has none, so a process that has
some writes down which.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import psutil

SOCKET, SHARED = "specrollout-drafter-", "specrollout-shared-"
"""How names begin, in the folder for temporary files: a process id follows, and a dash."""
SHM = Path("/dev/shm")
_SEGMENT = re.compile(r"/dev/shm/(psm_[0-9a-f]+)")


def own(prefix: str) -> str:
    """A name's beginning that says whose it is."""
    return f"{prefix}{os.getpid()}-"


def note_shared() -> None:
    """Write down the shared memory that this process and its children have, as vLLM's ranks have to talk by."""
    names: set[str] = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):
            names |= set(_SEGMENT.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    if names:
        Path(tempfile.gettempdir(), own(SHARED)).write_text("\n".join(sorted(names)), encoding="ascii")


def sweep() -> None:
    """Remove what processes have left that are no more."""
    for prefix in (SOCKET, SHARED):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
            pid = path.name.removeprefix(prefix).partition("-")[0]
            if not pid.isdecimal() or psutil.pid_exists(int(pid)):
                continue
            with contextlib.suppress(OSError):
                for name in path.read_text(encoding="ascii").split() if prefix == SHARED else ():
                    if re.fullmatch("psm_[0-9a-f]+", name):
                        (SHM / name).unlink(missing_ok=True)
                path.unlink()
