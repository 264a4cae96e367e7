"""Faults that come from outside: the plan, which follows from a seed, and how each is done and undone.

They need no rights that the server's user has not, and nothing of the server's own: a full disk is a limit on the size
of the worker's files, under which every write fails.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..runner.server import DRAFTER, WORKER, family

FULL, AWAY, STALL, KILL = "disk full", "folder away", "worker stalled", "drafter killed"
"""No write goes through; the history's folder is a file; the worker stands still; a drafter's process ends."""
_LENGTHS_S = {FULL: (15.0, 30.0), AWAY: (15.0, 30.0), STALL: (1.0, 3.0), KILL: (0.0, 0.0)}
_GAP_S = (60.0, 120.0)
_CALM_S = 30.0
"""Before the first one and after the last one, so that what follows a fault is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    # seconds since the first request could come
    begin_s: float
    end_s: float


def plan(seed: int, duration_s: float, kinds: Sequence[str]) -> list[Fault]:
    """Faults one after the other, each kind as often as the others; none in a run that is too short."""
    rng, found = random.Random(f"faults/{seed}"), list[Fault]()
    gaps = [min(gap, duration_s / 6.0) for gap in _GAP_S]
    now = max(_CALM_S, gaps[0])
    while kinds:
        kind = kinds[len(found) % len(kinds)]
        end = now + rng.uniform(*_LENGTHS_S[kind])
        if end > duration_s - _CALM_S:
            break
        found.append(Fault(kind=kind, begin_s=now, end_s=end))
        now = end + rng.uniform(*gaps)
    return found


@contextlib.contextmanager
def inflict(kind: str, root: int, history: Path) -> Iterator[None]:
    """A fault, as long as the block lasts.

    Args:
        root: the server's process id.
        history: its folder.
    """
    workers = [process for role, process in family(root) if role == WORKER]
    undone = contextlib.ExitStack()
    # what is gone meanwhile needs no undoing
    undone.enter_context(contextlib.suppress(psutil.Error))
    with undone:
        if kind == FULL:
            for worker in workers:
                known = worker.rlimit(psutil.RLIMIT_FSIZE)
                # Python ignores the signal that comes with it: the write fails with an OSError
                worker.rlimit(psutil.RLIMIT_FSIZE, (0, known[1]))
                undone.callback(worker.rlimit, psutil.RLIMIT_FSIZE, known)
        elif kind == AWAY:
            elsewhere = history.rename(history.with_name(history.name + "-away"))
            undone.callback(elsewhere.rename, history)
            history.touch()
            undone.callback(history.unlink, missing_ok=True)
        elif kind == STALL:
            for worker in workers:
                worker.suspend()
                undone.callback(worker.resume)
        else:
            for role, process in family(root):
                if role == DRAFTER:
                    process.kill()
        yield
