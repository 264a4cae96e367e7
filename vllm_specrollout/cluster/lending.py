"""Lending between engines that somebody else owns, such as a trainer's: idle ones lend their drafters to stragglers.

It asks engines how they stand, has `ladder.lend` say who drafts for whom, and carries that out, all by calls of
methods of their workers. It never waits for one: an engine that does not answer is left out until it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout.cluster.ladder import Attach, Copy, GroupEngine, lend
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import logger

BEAT_S = 0.5
"""Seconds between two looks at the engines."""
PATIENCE_S = 10.0
"""Seconds without an answer after which an engine is left out."""
_NOBODY = {"cause": "none of its ranks drafts", "hint": "ask the engine that has the first rank"}
_MOST_SAID = 16  # of what is wrong with one engine
LENT = "lent by "
"""Before a lender's name: what its drafter is called where it is attached."""

Ask = Callable[[str, tuple[Any, ...]], "Future[Sequence[Any]] | asyncio.Future[Sequence[Any]]"]
"""A method of an engine's workers, and its arguments; what each worker answers. It returns at once."""

Warm = tuple[str, list[str], dict[str, Any]]
"""Model of a drafter, its devices as the engine counts them (none: the engine's own), arguments of its engine."""


@dataclass(slots=True)
class _Own:
    """One engine."""

    ask: Ask
    # the drafter that it is to begin beside itself, unless it has one; None: none
    warm: Warm | None = None
    # as it said last, and was told since; its version is None while it is left out, and 0 else
    stands: GroupEngine = field(default_factory=GroupEngine)
    # the call in flight: its method, and when it was made
    call: Future[Sequence[Any]] | asyncio.Future[Sequence[Any]] | None = None
    method: str = ""
    asked_at: float = 0.0
    # calls that follow
    todo: deque[tuple[str, tuple[Any, ...]]] = field(default_factory=deque)
    # request -> its tokens, and the engine's steps, when it was first heard of
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    # whether nothing was decided since it said how it stands
    is_fresh: bool = False
    # whether it may yet begin a warm drafter
    may_warm: bool = True
    verified: int = 0
    accepted: int = 0
    # what is wrong, empty: nothing; and what was said of it
    wrong: str = ""
    said: set[str] = field(default_factory=set)


class Lending:
    """
    Args:
        engines: name -> how it is asked. Each needs `{"placement": "decoupled"}`.
        drafter: model that each engine begins beside itself, warm, unless it has one; empty: none.
        devices: of that drafter, as its engine counts them; empty: the engine's cores.
        drafter_engine: further arguments of the drafter's engine.
        most: requests that one idle engine's drafter is lent to.
        clock: seconds, from any zero.

    Raises:
        ConfigError: `most` cannot be used.
    """

    def __init__(
        self,
        engines: Mapping[str, Ask],
        *,
        drafter: str = "",
        devices: Sequence[str] = (),
        drafter_engine: Mapping[str, Any] | None = None,
        most: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_range("most", most, 1, 4096)
        self.lent = 0
        """How often a drafter was lent to an engine."""
        self._engines: dict[str, _Own] = {}
        self._warm = (drafter, list(devices), dict(drafter_engine or {})) if drafter else None
        self._most, self._clock = most, clock
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.add(engines)

    # --- by whoever owns the engines ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Look at the engines every `BEAT_S`, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._run, name="specrollout-lending", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take back what is lent, as far as that can be said without waiting, and look no more."""
        self._ended.set()
        with self._lock:
            self.remove(list(self._engines))

    def add(self, engines: Mapping[str, Ask], warm: Warm | None = None) -> None:
        """Further engines.

        Args:
            warm: their drafter; None: as of all.
        """
        with self._lock:
            self._engines |= {name: _Own(ask, warm or self._warm) for name, ask in engines.items()}

    def remove(self, names: Sequence[str]) -> None:
        """These are somebody else's now. What they lent is taken back in the next beat, what they borrowed at once."""
        with self._lock:
            for name in names:
                if (own := self._engines.pop(name, None)) is not None:
                    for lender in own.stands.lent:
                        with contextlib.suppress(Exception):  # it may be gone already
                            own.ask("detach_drafter", (LENT + lender,))

    def status(self) -> dict[str, Any]:
        """In plain values. Nodes are those of drafters elsewhere, in the steps of the engines that are there."""
        with self._lock:
            engines = {
                name: {
                    "is_heard": own.stands.version is not None,
                    "running": len(own.stands.running),
                    "drafter": own.stands.method if own.stands.drafter else "",
                    "borrowed": {lender: len(requests) for lender, requests in own.stands.lent.items()},
                    "wrong": own.wrong,
                }
                for name, own in self._engines.items()
            }
            verified = sum(own.verified for own in self._engines.values())
            accepted = sum(own.accepted for own in self._engines.values())
            return {"lent": self.lent, "verified_nodes": verified, "accepted_nodes": accepted, "engines": engines}

    # --- the beat -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self.beat()
            except Exception:  # a thread would end without a word
                logger.exception("Spec rollout: drafters are lent no more")
                return

    def beat(self, *, is_lent: bool = True) -> None:
        """Take in what was answered, decide, and ask what is next.

        Args:
            is_lent: whether anything may be lent from now on; else all is taken back.
        """
        with self._lock:
            for name, own in self._engines.items():
                self._hear(name, own)
            stands = {name: own.stands for name, own in self._engines.items()}
            # one that was told something since it spoke stands otherwise than it said; and an answer that is on its
            # way would know nothing of what is told now
            fresh = {name for name, own in self._engines.items() if own.is_fresh and own.call is None}
            for command in lend(stands, self._most if is_lent else 0):
                if command.engine in fresh:
                    self._attach(command)
            for own in self._engines.values():
                self._ask_next(own)

    def _hear(self, name: str, own: _Own) -> None:
        if own.call is None:
            return
        if not own.call.done():
            # one that was never heard may still start
            if own.stands.version is not None and self._clock() - own.asked_at > PATIENCE_S:
                self._leave_out(name, own, "it does not answer")
            return
        call, own.call = own.call, None
        try:
            # of its ranks, those that do not draft say nothing
            found: Mapping[str, Any] = next((one for one in call.result() if one), _NOBODY)
        except Exception as error:  # whatever its owner's calls raise
            self._leave_out(name, own, f"{type(error).__name__}: {error}")
            return
        is_refused, is_standing = "cause" in found, own.method == "spec_rollout_standing"
        if is_refused:
            self._complain(name, own, f"{found['cause']}; {found['hint']}")
            own.may_warm = own.may_warm and own.method != "spec_rollout_warm"
        if is_standing and is_refused:
            own.stands.version = None
        elif is_standing:
            self._take(own, found)

    def _leave_out(self, name: str, own: _Own, wrong: str) -> None:
        self._complain(name, own, wrong)
        own.stands.version = None

    def _complain(self, name: str, own: _Own, wrong: str) -> None:
        # said once: an engine that takes in weights is silent for long, and that comes back
        if wrong not in own.said and len(own.said) < _MOST_SAID:
            own.said.add(wrong)
            logger.warning("Spec rollout: drafters are not lent as they could be: engine %s: %s", name, wrong)
        own.wrong = wrong

    def _take(self, own: _Own, found: Mapping[str, Any]) -> None:
        """How it stands."""
        steps, running, was_out = found["steps"], found["running"], own.stands.version is None
        own.first = {request: own.first.get(request, (tokens, steps)) for request, (_, tokens) in running.items()}
        own.stands = GroupEngine(
            version=0,
            places=found["places"],
            running={
                request: Copy(prompt, tokens, tokens - own.first[request][0], steps - own.first[request][1])
                for request, (prompt, tokens) in running.items()
            },
            host=found["host"],
            drafter=found["drafter"],
            method=found["model"],
            lent={
                name.removeprefix(LENT): tuple(requests)
                for name, requests in found["attached"].items()
                if name.startswith(LENT)
            },
        )
        own.verified, own.accepted = found["verified"], found["accepted"]
        # while it was left out, what it has borrowed was lent to others
        stale = own.stands.lent if was_out else {}
        own.todo += [("detach_drafter", (LENT + lender,)) for lender in stale]
        own.is_fresh = not stale
        if own.may_warm:
            own.wrong = ""
        if own.warm is not None and own.may_warm and not found["model"]:
            own.todo.append(("spec_rollout_warm", own.warm))

    def _attach(self, command: Attach) -> None:
        own, lender = self._engines[command.engine], command.lender
        own.is_fresh = False
        name, requests, lent = LENT + lender, list(command.requests), own.stands.lent
        if not requests:
            del lent[lender]
            own.todo.append(("detach_drafter", (name,)))
        elif lender in lent:
            own.todo.append(("assign_drafter", (name, requests)))
        else:
            self.lent += 1
            address = self._engines[lender].stands.drafter
            own.todo.append(("attach_drafter", (name, address, None, None, requests)))
        if requests:
            lent[lender] = command.requests

    def _ask_next(self, own: _Own) -> None:
        if own.call is not None:
            return
        own.method, args = own.todo.popleft() if own.todo else ("spec_rollout_standing", ())
        own.asked_at = self._clock()
        own.call = own.ask(own.method, args)
