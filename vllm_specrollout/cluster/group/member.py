"""A worker's loop: it runs what the driver gives it, follows the coordinator, and tells both how drafts are met. Pure.

Neither of the two is ever waited for. Where the coordinator is gone, the worker goes on with what it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_specrollout.cluster.group.channel import Line
from vllm_specrollout.cluster.group.messages import (
    Attach,
    Call,
    Cancel,
    Detach,
    Here,
    Link,
    Message,
    Piece,
    Progress,
    Race,
    Report,
    Run,
    Running,
    Want,
)
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord

logger = logging.getLogger("vllm.specrollout")

BEAT_S = 0.5
"""Seconds between two calls of the driver, and between two reports of a state that does not change."""


class Engine(Protocol):
    """An engine that verifies; `worker.rollout.engine.RolloutEngine` is one."""

    places: int

    @property
    def drafter(self) -> str:
        """Where a warm drafter on its cores listens, once it can draft; empty: none does."""
        ...

    @property
    def drafter_model(self) -> str:
        """What drafts there."""
        ...

    def add(self, run: Run) -> None:
        """Begin a request, or go on with it.

        Raises:
            ValueError: it cannot be run.
        """
        ...

    def abort(self, request: str) -> None:
        """End it, and free what it holds; unknown ones do not matter."""
        ...

    def step(self) -> Sequence[Piece]:
        """One step for all its requests; `Piece.start` counts from the answer's first token."""
        ...

    def tries(self, request: str) -> tuple[int, int]:
        """(tried, matched): drafted tokens that the target got to, and those that it sampled itself."""
        ...

    def draft_with(self, method: str) -> None:
        """Draft with this method alone from now on; empty: with all that there are.

        Raises:
            SpecRolloutError: it has no such method.
        """
        ...

    def attach(self, drafter: str, address: str, requests: Sequence[str]) -> None:
        """Another process drafts for these requests as well, and for no others of this engine."""
        ...

    def detach(self, drafter: str) -> None:
        """It does no longer; unknown ones do not matter."""
        ...

    def links(self) -> Sequence[Link]:
        """The drafters that are attached."""
        ...


class Member:
    """One worker of a group.

    Args:
        coordinator: None: nobody helps anybody.
        clock: seconds, from any zero.
        devices: where it runs, as `cpu:0`.
    """

    def __init__(
        self,
        engine: Engine,
        driver: Line,
        coordinator: Line | None = None,
        clock: Callable[[], float] = time.monotonic,
        devices: tuple[str, ...] = (),
    ) -> None:
        self._engine, self._driver, self._coordinator = engine, driver, coordinator
        self._clock, self._devices = clock, devices
        # request -> whether it runs elsewhere as well
        self._running: dict[str, bool] = {}
        self._finished: list[str] = []
        self._method = ""
        # number of the call that is to be answered; None: none is
        self._called: int | None = 0
        self._has_drafter = False
        self._report_at = float("-inf")
        self._has_changed = True
        # kinds of commands that could not be followed once: they come again and again
        self._refused: set[str] = set()

    @property
    def is_idle(self) -> bool:
        return not self._running

    def turn(self) -> None:
        """Once around: take in what has come, one step, tell what came of it."""
        for message in self._driver.receive():
            self._take(message)
        for message in self._coordinator.receive() if self._coordinator is not None else ():
            self._take(message)
        if self._running:
            pieces = tuple(piece for piece in self._engine.step() if piece.request in self._running)
            for piece in pieces:
                if piece.finish:
                    self._over(piece.request)
                    if self._coordinator is not None:
                        self._finished.append(piece.request)
            if pieces:
                self._driver.send(Progress(pieces, self._method, tuple(self._engine.links())))
        self._tell()

    def _take(self, message: Message) -> None:
        match message:
            case Run():
                self._run(message)
            case Call(number, has_drafter):
                self._called = number
                self._has_changed |= has_drafter != self._has_drafter
                self._has_drafter = has_drafter
            case Cancel(request):
                if request in self._running:
                    self._engine.abort(request)
                    self._over(request)
            case Race(request, method):
                self._race(request, method)
            case Attach(drafter, address, requests):
                own = tuple(request for request in requests if request in self._running)
                if own:
                    self._follow("attach", lambda: self._engine.attach(drafter, address, own))
            case Detach(drafter):
                self._follow("detach", lambda: self._engine.detach(drafter))

    def _run(self, run: Run) -> None:
        if run.request in self._running:
            return
        if not run.is_copy and self._method:
            # the ladder is over for this worker: it drafts as it did at first
            self._draft_with("")
        try:
            self._engine.add(run)
        except ValueError as error:
            piece = Piece(run.request, len(run.answer), (), finish="error", reason=str(error))
            self._driver.send(Progress((piece,)))
            return
        self._running[run.request] = run.is_copy
        self._has_changed = True

    def _race(self, request: str, method: str) -> None:
        if self._running and self._method != method:
            return  # it was idle when it was chosen, and is no longer
        if self._method == method or self._draft_with(method):
            self._driver.send(Want(request))

    def _draft_with(self, method: str) -> bool:
        if not self._follow("race", lambda: self._engine.draft_with(method)):
            return False
        self._method, self._has_changed = method, True
        return True

    def _follow(self, kind: str, what: Callable[[], None]) -> bool:
        try:
            what()
        except (SpecRolloutError, OSError) as error:
            # it costs a help, and nothing else
            if kind not in self._refused:
                self._refused.add(kind)
                logger.warning("Spec rollout: a worker cannot follow `%s`: %s", kind, error)
            return False
        self._has_changed = True
        return True

    def _over(self, request: str) -> None:
        del self._running[request]
        self._has_changed = True

    def _tell(self) -> None:
        now = self._clock()
        if self._called is not None:
            self._driver.send(Here(self._engine.places, self._called, tuple(self._running)))
            self._called = None
        if self._coordinator is None or not (self._has_changed or now >= self._report_at):
            return
        self._report_at, self._has_changed = now + BEAT_S, False
        running = tuple(
            Running(request, is_copy, *self._engine.tries(request)) for request, is_copy in self._running.items()
        )
        finished, self._finished = tuple(self._finished), []
        engine = self._engine
        report = Report(
            self._method,
            running,
            finished,
            engine.drafter if self._has_drafter else "",
            engine.drafter_model,
            links=tuple(engine.links()),
            devices=self._devices,
        )
        self._coordinator.send(report)


class Tries(Listener):
    """How many drafted tokens of each request the target got to, and how many of them it sampled itself.

    Args:
        name_of: of an engine's name for a request: its client's.
    """

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        # request, by its client's name -> (tried, matched)
        self.counts: dict[str, tuple[int, int]] = {}

    def begin(self, request: str) -> None:
        """Count for it, until it is forgotten."""
        self.counts[request] = (0, 0)

    def forget(self, request: str) -> None:
        self.counts.pop(request, None)

    def stepped(self, record: StepRecord) -> None:
        trees = record.trees
        accepted = record.result.num_accepted.tolist()
        for i, (name, own) in enumerate(zip(trees.request_ids, accepted, strict=True)):
            start, end = trees.node_start[i : i + 2]
            request = self._name_of(name)
            # a step is told of when the next one begins: its requests may be over by then
            if end == start or request not in self.counts:
                continue
            tried, matched = self.counts[request]
            # a path that is accepted to its leaf was missed nowhere
            missed = own < int(trees.depth[start:end].max())
            self.counts[request] = (tried + own + missed, matched + own)
