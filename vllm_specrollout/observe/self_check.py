"""Record of an engine's self-check on its device: what failed, what may be drafted then, what the next start must know.

What belongs here: the parts' names, the rule from failures to what is allowed, the files that outlive the process, the
deadline of a part. What the parts do is in worker/v2/self_check.py. `docs/concepts/self-check.md` tells all of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vllm_specrollout.config import envs
from vllm_specrollout.errors import logger
from vllm_specrollout.types import DraftMode

VERIFY, CHAINS, ATTENTION, COMMIT = "verify", "chains", "tree attention", "commit"
TREES, TREE_GRAPHS = "trees", "tree graphs"
CRASH = "an earlier start"
PARTS = (VERIFY, CHAINS, ATTENTION, COMMIT, TREES, TREE_GRAPHS)
"""In the order in which they run."""
DEADLINE_S = 120.0
"""Of one part, which takes a second at most: whatever takes so long hangs."""
_GRACE_S = 10.0
"""Between an exception thrown into a part that hangs, and the end of the process that does not heed it."""

_STDERR = 2
_MOST_TOLD = 500
"""Characters of an exception: compilers tell all they know."""

LEAST = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""Tolerance where logits are small: they are sums of many roundings, whose own size does not shrink with them."""
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def tolerance(dtype: str, logits: Iterable[float], temperature: float = 0.0) -> float:
    """Most by which level candidates may be apart: each logit may be off by two units in its last place.

    Args:
        logits: of both, before temperature; those that are not finite count for nothing.
        temperature: 0: nothing is divided.
    """
    places = (2.0 ** (math.frexp(logit)[1] - 1) for logit in logits if math.isfinite(logit) and logit)
    return max(LEAST[dtype], sum(2.0 * _EPSILON[dtype] * place for place in places) / (temperature or 1.0))


def in_words(error: BaseException) -> str:
    """What was wrong, in one line's words."""
    return f"{type(error).__name__}: {error}"[:_MOST_TOLD]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What an engine may do after its self-check."""

    shape: DraftMode
    # drafts are judged by our kernel; else by vLLM's sampler and plain torch
    has_kernel: bool = True


def allowed(failed: Mapping[str, str]) -> Allowed:
    """What is left after these parts failed: trees, chains, nothing, in this order.

    Args:
        failed: part -> what was wrong.
    """
    if CHAINS in failed:
        return Allowed(DraftMode.OFF, has_kernel=False)
    is_tree = not failed.keys() & {VERIFY, ATTENTION, COMMIT, TREES, TREE_GRAPHS, CRASH}
    return Allowed(
        DraftMode.TREE if is_tree else DraftMode.CHAIN,
        has_kernel=not failed.keys() & {VERIFY, CRASH},
    )


class Record:
    """Files that tell the next start how this one went.

    Every process that checks itself holds a `pending` file by a lock, which ends with the process, in whatever
    container or on whatever host of a shared folder. A fault writes its words into that file, and so does a part that
    hangs. Whoever is killed leaves none: that says nothing about the device. One that has passed everything leaves a
    `passed` file for all.

    Args:
        key: what the verdict holds for: device, driver, versions, model, our source.
        folder: None: below the user's cache folder.
        device: the very one. What passed on one holds for all of its kind; a fault may be its own.
    """

    def __init__(self, key: str, folder: Path | None = None, device: str = "any") -> None:
        self.folder = folder or envs.cache_dir() / "self-check"
        self.key = key
        self.device = device
        self.start = secrets.token_hex(8)
        self._file: BinaryIO | None = None
        self._had_handler = False

    def join(self, start: str) -> None:
        """This rank checks the engine of that start: what several ranks die of is one crash."""
        self.start = start

    @property
    def has_passed(self) -> bool:
        """Whether an engine like this one has passed every part on this device."""
        return (self.folder / f"{self.key}.passed").exists()

    def crash(self) -> str:
        """What two earlier starts on this device died of, with none since that passed; empty: all is to be checked."""
        died = dict(self._faults())
        if len(died) < 2:
            return ""
        part, fault, path = next(iter(died.values()))
        return f"{len(died)} starts died, one in the part `{part}` of `{fault.splitlines()[0]}` ({path})"

    def _faults(self) -> Iterator[tuple[str, tuple[str, str, Path]]]:
        """(start, (part, what it died of, file)) of each process that died; one that was killed is forgotten."""
        for path in sorted(self.folder.glob(f"{self.key}.{self.device}.*.pending")):
            # one that is locked runs now; where nothing can be locked, nothing is known
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                part, _, fault = file.read(_MOST_TOLD).decode(errors="replace").partition("\n")
                if fault:
                    yield path.name.split(".")[2], (part, fault, path)
                else:
                    path.unlink()

    def begin(self, part: str) -> None:
        """This part runs from now on."""
        with _told_only():
            file = self._file or self._opened()
            file.truncate(0)
            file.write(f"{part}\n".encode())

    def _opened(self) -> BinaryIO:
        """This process's own pending file, locked before anybody can find it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.key}.{self.device}.{self.start}.{secrets.token_hex(4)}.new"
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            path.rename(path.with_suffix(".pending"))
        except OSError:
            path.unlink()
            raise
        self._file, self._had_handler = file, faulthandler.is_enabled()
        # it writes as the process dies of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL
        faulthandler.enable(file, all_threads=False)
        return file

    def fault(self, what: str) -> None:
        """This process dies of it."""
        with _told_only():
            if self._file is not None:
                self._file.write(what.encode())

    def end(self, failed: Mapping[str, str]) -> None:
        """All parts are over."""
        with _told_only():
            if not failed:
                (self.folder / f"{self.key}.passed").touch()
                for _, (*_, path) in self._faults():
                    path.unlink(missing_ok=True)
            else:
                (self.folder / f"{self.key}.passed").unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """This process did not die in any part."""
        if self._file is None:
            return
        faulthandler.disable()
        if self._had_handler:
            faulthandler.enable(_STDERR)
        Path(self._file.name).with_suffix(".pending").unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def clear(self) -> None:
        """What earlier processes left is forgotten: all is checked anew."""
        for path in self.folder.glob(f"{self.key}.*"):
            path.unlink(missing_ok=True)


@contextmanager
def _told_only() -> Iterator[None]:
    """A folder that cannot be written costs the record, and nothing else."""
    try:
        yield
    except OSError as error:
        logger.warning("Spec rollout: the self-check is not remembered: %s", error)


class HungError(Exception):
    """A part of the self-check did not end."""


@contextmanager
def deadline(
    part: str, seconds: float = DEADLINE_S, grace_s: float = _GRACE_S, end: Callable[[], None] | None = None
) -> Iterator[None]:
    """A part that does not end in time is left by an exception; a process that does not heed it ends.

    A kernel that hangs cannot be left, and an engine that waits for it for ever is worse than one that ends: if the
    next start hangs as well, the one after it goes without.

    Args:
        end: what ends the process.
    """
    thread = threading.get_ident()
    over = threading.Event()

    def watch() -> None:
        if over.wait(seconds):
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(HungError))
        if not over.wait(grace_s):
            logger.error(
                "Spec rollout: the self-check hangs in `%s`, so this process ends. hint: start it again; once it"
                " has hung twice, it drafts chains without our kernel; `specrollout doctor --gpu` checks anew",
                part,
            )
            (end or (lambda: os._exit(70)))()

    watcher = threading.Thread(target=watch, name="spec-rollout-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        # One thrown just now arrives in here. Taking it back is not sound in Python 3.11: a flag stays up, with which a
        # process that is profiled loops for ever.
        watcher.join()
