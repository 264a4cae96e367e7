"""The loop of a process in which a model drafts. Pure: its engine and its mailbox are given.

It takes in what the verifier says, drafts while it may, sends what it drafted, and ends with its verifier, or stays for
the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.mailbox import Mailbox, drained
from vllm_specrollout.cluster.messages import (
    Beat,
    Bye,
    Close,
    Drafts,
    Hello,
    Message,
    Noise,
    Open,
    Role,
    Verdict,
)

logger = logging.getLogger("vllm.specrollout")

BEAT_S = 1.0
"""Seconds between two signs of life."""
_IDLE_S = 0.2  # longest wait for a message; the parent is looked for as often


@dataclass(slots=True)
class Work:
    """What an engine has done since it was last asked."""

    passes: int = 0
    # summed over passes: streams in them, and nodes that they looked at
    streams: int = 0
    rows: int = 0


class Engine(Protocol):
    """An engine that drafts; `worker.streams.engine.StreamEngine` is one."""

    vocab_size: int
    max_requests: int
    drafted: int
    work: Work

    @property
    def may_draft(self) -> bool:
        """Whether a step would draft anything."""
        ...

    def meet(self, noise: NoiseKind) -> None:
        """What seeds of requests to come are; there are none now."""
        ...

    def take(self, message: Message) -> None:
        """What the verifier says of a request."""
        ...

    def step(self) -> list[Drafts]:
        """Draft a token for each request that may have one; what is to be sent."""
        ...

    def close_all(self) -> None:
        """No request is drafted for any more."""
        ...


class Loop:
    """An engine and its verifier.

    Args:
        stays: whether it goes on once its verifier has said goodbye, with nothing of it left.
        is_over: asked each time around: whether the process should end.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        *,
        stays: bool = False,
    ) -> None:
        self._engine, self._mailbox = engine, mailbox
        self._is_over, self._clock, self._stays = is_over, clock, stays
        self._is_ended = False
        self._next_beat = 0.0
        self._was_heard = self._has_greeted = False
        self._busy_s = 0.0
        # what the verifier said last; one that this end does not know is answered with none
        self._noise = TAPE
        # handle of each request that was opened -> whether anything was said of it since the last beat
        self._opened: dict[int, bool] = {}

    def run(self) -> None:
        """Until the verifier says goodbye, or the process should end."""
        # what was said to one that ran here before is of no use
        while self._mailbox.receive():
            pass
        self._greet()
        while not self._is_ended:
            self.turn()

    def turn(self) -> None:
        """Once around."""
        for message in drained(self._mailbox.receive):
            self._take(message)
            self._was_heard = True
        may_draft, begin = self._engine.may_draft, self._clock()
        for drafts in self._engine.step():
            self._mailbox.send(drafts)
        now = self._clock()
        if may_draft:
            self._busy_s += now - begin
        else:
            self._mailbox.wait(_IDLE_S)
        if now >= self._next_beat:
            # a verifier that says nothing may not listen either: beats would pile up
            if self._was_heard:
                work = self._engine.work
                done = (work.passes, work.streams, work.rows)
                self._mailbox.send(Beat(self._busy_s * 1e3, self._engine.drafted, *done))
                self._ask()
            self._next_beat, self._busy_s, self._was_heard = now + BEAT_S, 0.0, False
            self._engine.work = Work()
        self._is_ended = self._is_ended or self._is_over()

    def _take(self, message: Message) -> None:
        match message:
            case Hello():
                self._forget_all()
                self._meet(NoiseKind.of(message))
                self._greet()
            case Bye():
                self._forget_all()
                self._is_ended = not self._stays
            case _:
                self._note(message)
                if not self._has_greeted:
                    # one that it drafted for in a former life, and that nothing could be sent to before it spoke
                    self._greet()
                if self._noise.is_known:
                    self._engine.take(message)

    def _note(self, message: Message) -> None:
        """Of which requests the verifier speaks."""
        match message:
            case Open():
                self._opened[message.handle] = True
            case Verdict():
                if message.handle in self._opened:
                    self._opened[message.handle] = True
            case Close():
                self._opened.pop(message.handle, None)

    def _ask(self) -> None:
        """Ask after the requests that nothing was said of lately: where one's end was lost, its stream would stay.

        A question that is lost is asked again with the next beat, so neither end has to keep what it said.
        """
        for handle, was_told in self._opened.items():
            if not was_told:
                ints = np.zeros(0, dtype=np.int32)
                self._mailbox.send(Drafts(handle, 0, 0, ints, ints, np.zeros(0, dtype=np.float32)))
            self._opened[handle] = False

    def _forget_all(self) -> None:
        self._engine.close_all()
        self._opened.clear()

    def _meet(self, noise: NoiseKind) -> None:
        """The verifier's noise is this one."""
        if noise.is_known:
            self._engine.meet(noise)
        elif noise != self._noise:
            logger.warning("Spec rollout: nothing is drafted: this drafter does not know the target's noise, %s", noise)
        self._noise = noise

    def _greet(self) -> None:
        said = self._noise if self._noise.is_known else NoiseKind(Noise.NONE)
        self._has_greeted = self._mailbox.send(
            Hello(Role.DRAFTER, self._engine.vocab_size, said.noise, self._engine.max_requests, 0, said.details)
        )
