"""Record of an engine's self-check on its device: what failed, what may be drafted then, what the next start must know.

What belongs here: the parts' names, the rule from failures to what is allowed, the files that outlive the process, the
deadline of a part. What the parts do is in worker/v2/self_check.py. `docs/concepts/self-check.md` tells all of it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_specrollout.config import envs
from vllm_specrollout.types import DraftMode

logger = logging.getLogger("vllm.specrollout")

VERIFY, ATTENTION, COMMIT = "verify", "tree attention", "commit"
CHAINS, CHAIN_GRAPHS, TREES, TREE_GRAPHS = "chains", "chain graphs", "trees", "tree graphs"
CRASH = "an earlier start"
PARTS = (VERIFY, ATTENTION, COMMIT, CHAINS, CHAIN_GRAPHS, TREES, TREE_GRAPHS)
"""In the order in which they run."""
DEADLINE_S = 120.0
"""Of one part, which takes a second at most: whatever takes so long hangs."""
_GRACE_S = 10.0
"""Between an exception thrown into a part that hangs, and the end of the process that does not heed it."""

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
    # steps with drafts may replay graphs
    has_graphs: bool = True
    # drafts are judged by our kernel; else by vLLM's sampler and plain torch
    has_kernel: bool = True


def allowed(failed: Mapping[str, str]) -> Allowed:
    """What is left after these parts failed: trees, chains, chains without graphs, nothing, in this order.

    Args:
        failed: part -> what was wrong.
    """
    if CHAINS in failed:
        return Allowed(DraftMode.OFF, has_graphs=False, has_kernel=False)
    is_tree = not failed.keys() & {VERIFY, ATTENTION, COMMIT, TREES, TREE_GRAPHS, CRASH}
    return Allowed(
        DraftMode.TREE if is_tree else DraftMode.CHAIN,
        has_graphs=not failed.keys() & {CHAIN_GRAPHS, CRASH},
        has_kernel=not failed.keys() & {VERIFY, CRASH},
    )


class Record:
    """Files that tell the next start how this one went.

    A process that dies in a part leaves its `pending` file behind; several engines on a host may check themselves at
    the same time, so each has one of its own. One that has passed everything leaves a `passed` file for all.

    Args:
        key: what the verdict holds for: device, driver, versions, model, our source.
        folder: None: below the user's cache folder.
    """

    def __init__(self, key: str, folder: Path | None = None) -> None:
        self.folder = folder or envs.cache_dir() / "self-check"
        self.key = key
        self._pending = self.folder / f"{key}.{socket.gethostname()}.{os.getpid()}.pending"

    @property
    def has_passed(self) -> bool:
        """Whether an engine like this one has passed every part on this device."""
        return (self.folder / f"{self.key}.passed").exists()

    def crash(self) -> str:
        """The part in which an earlier process died; empty: none did."""
        for path in sorted(self.folder.glob(f"{self.key}.*.pending")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(path.read_text())
                if not _runs(told, time.time() - path.stat().st_mtime):
                    return f"died in the part `{told['part']}` ({path})"
        return ""

    def begin(self, part: str) -> None:
        """This part runs from now on."""
        told = {"part": part, "pid": os.getpid(), "began": psutil.Process().create_time(), "host": socket.gethostname()}
        with _told_only():
            self.folder.mkdir(parents=True, exist_ok=True)
            written = self._pending.with_suffix(".new")
            written.write_text(json.dumps(told))
            written.replace(self._pending)

    def end(self, failed: Mapping[str, str]) -> None:
        """All parts are over."""
        with _told_only():
            if not failed:
                (self.folder / f"{self.key}.passed").touch()
            else:
                (self.folder / f"{self.key}.passed").unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """This process did not die in any part."""
        self._pending.unlink(missing_ok=True)

    def clear(self) -> None:
        """What earlier processes left is forgotten: all is checked anew."""
        for path in self.folder.glob(f"{self.key}.*"):
            path.unlink(missing_ok=True)


def _runs(told: Mapping[str, object], age_s: float) -> bool:
    """Whether the process that wrote a pending file may still be at it."""
    if told["host"] != socket.gethostname():
        return age_s < len(PARTS) * (DEADLINE_S + _GRACE_S)
    with suppress(psutil.Error):
        return abs(psutil.Process(int(str(told["pid"]))).create_time() - float(str(told["began"]))) < 1.0
    return False


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

    A kernel that hangs cannot be left, and an engine that waits for it for ever is worse than one that ends: the next
    start finds its pending file and goes without.

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
                "Spec rollout: the self-check hangs in `%s`, so this process ends. hint: start it again: it then drafts"
                " chains without CUDA graphs; `specrollout doctor --gpu` checks anew",
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
