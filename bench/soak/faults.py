"""Faults that come from outside: the plan, which follows from a seed, and how each is done and undone.

What belongs here needs no rights that the server's user has not, and nothing of the server's own: so a full disk is a
limit on the size of the worker's files, under which every write fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .processes import DRAFTER, family, role_of

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


@dataclass(frozen=True, slots=True)
class Faults:
    """Does them to one server.

    Args:
        root: the server's process id.
        history: its folder.
    """

    root: int
    history: Path

    @contextlib.contextmanager
    def inflict(self, kind: str) -> Iterator[None]:
        """A fault, as long as the block lasts."""
        acts: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            FULL: self._full,
            AWAY: self._away,
            STALL: self._stalled,
            KILL: self._killed,
        }
        with acts[kind]():
            yield

    def _workers(self) -> list[int]:
        found = []
        for pid in family(self.root):
            with contextlib.suppress(OSError):
                found += [pid] if role_of(pid, self.root) == "worker" else []
        return found

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in self._workers()}
        try:
            for pid, (_, hard) in limits.items():
                # Python ignores the signal that comes with it: the write fails with an OSError
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
            yield
        finally:
            for pid, known in limits.items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, known)

    @contextlib.contextmanager
    def _away(self) -> Iterator[None]:
        elsewhere = self.history.with_name(self.history.name + "-away")
        self.history.rename(elsewhere)
        try:
            self.history.touch()
            yield
        finally:
            self.history.unlink(missing_ok=True)
            elsewhere.rename(self.history)

    @contextlib.contextmanager
    def _stalled(self) -> Iterator[None]:
        stopped = self._workers()
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def _killed(self) -> Iterator[None]:
        for pid in family(self.root):
            with contextlib.suppress(OSError):
                if role_of(pid, self.root) == DRAFTER:
                    os.kill(pid, signal.SIGKILL)
        yield
