"""A link: what an engine has to do with one drafter elsewhere. Pure: its mailbox and its requests are given.

What belongs here: whether that drafter is there, the process behind it, and what others are shown of it. What it is
told of requests is in following.py; several links, and one tree out of theirs, are in drafters/decoupled.py. Nothing
here waits, and whatever the drafter does can at worst cost its drafts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from vllm_specrollout.cluster.child import DrafterProcess, DrafterProcessError
from vllm_specrollout.cluster.counter import NoiseKind
from vllm_specrollout.cluster.following import Requests, TargetNoise
from vllm_specrollout.cluster.mailbox import Mailbox, drained
from vllm_specrollout.cluster.messages import Beat, Bye, Drafts, Hello, Message, Noise, Role

logger = logging.getLogger("vllm.specrollout")

HANG_S = 30.0
"""Seconds without an answer after which a drafter counts as hanging. A process of the engine's own is begun anew."""
_BEATS = 600  # kept
_MOST_UNTOLD = 3
"""Greetings in a row that say another noise than the target's, after which a drafter is taken not to know it. One may
be on its way when the target greets; the others are for a drafter that is begun anew meanwhile."""
# seconds after which a drafter that has not answered is greeted again: at first, and at most
_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 64.0


class Line:
    """A mailbox as a verifier has it: the seconds in which anybody waits at it are counted."""

    def __init__(self, mailbox: Mailbox, clock: Callable[[], float]) -> None:
        # these answer at once, by the contract of all mailboxes, and are not slowed down by being counted
        self.send, self.receive, self.close = mailbox.send, mailbox.receive, mailbox.close
        self.waited_s = 0.0
        self._mailbox, self._clock = mailbox, clock

    def wait(self, timeout_s: float) -> bool:
        begin = self._clock()
        try:
            return self._mailbox.wait(timeout_s)
        finally:
            self.waited_s += self._clock() - begin


class Link:
    """One drafter elsewhere.

    Args:
        name: what the engine calls it.
        mailbox: to the drafter's process.
        noise: of the engine.
        window, fan_out, only: as in `Requests`.
        vocab_size: the target's.
        process: the one that the engine has begun; None: somebody else did.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        noise: TargetNoise,
        *,
        window: int,
        fan_out: int,
        vocab_size: int,
        only: Iterable[str] | None = None,
        process: DrafterProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.address = name, mailbox.address
        self.process = process
        self.line = Line(mailbox, clock)
        self.requests = Requests(
            self.line.send, noise, window=window, fan_out=fan_out, vocab_size=vocab_size, only=only, clock=clock
        )
        self.is_there = False
        """Whether the drafter has said that it is ready."""
        self.error = ""
        """Why it will not draft; empty: it does, or may yet."""
        self.drafted, self.busy_s = 0, 0.0
        """Tokens, and seconds spent on them, by the drafter's own word."""
        self.beats: deque[Beat] = deque(maxlen=_BEATS)
        """What the process did, about a second each, newest last."""
        self._vocab_size, self._noise, self._clock = vocab_size, noise.kind, clock
        # greetings, one behind another, that did not say the target's noise
        self._untold = 0
        # when it is greeted again
        self._greet_at, self._patience_s = 0.0, _FIRST_PATIENCE_S

    @property
    def waited_s(self) -> float:
        """Seconds that the verifier has waited for this drafter; 0.0 unless something is broken.

        Two things can block: a mailbox's `wait`, which verifiers never call, and the wait for the end of a process.
        Both are timed where they happen, and so is how long it takes to begin a process anew, which a step does where
        one has ended. Else a step does none of it: it takes what has come, and signals processes without waiting for
        them. The engine's start may wait for drafters, before there are any requests.
        """
        return self.line.waited_s + (0.0 if self.process is None else self.process.waited_s)

    def greet(self) -> None:
        """Say that the engine is here; the drafter says the same once it is ready."""
        self.line.send(Hello(Role.VERIFIER, self._vocab_size, self._noise.noise, 0, 0, self._noise.details))
        self._greet_at = self._clock() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)

    def watch(self) -> None:
        """Look after the drafter: whether it still lives, and whether it is to be greeted again."""
        if self.error and self._untold < _MOST_UNTOLD:
            if self.process is not None:
                self.process.see_off()
            return
        told_at, now = self.requests.told_at, self._clock()
        if self.is_there and told_at is not None and now - told_at > HANG_S:
            if self.process is None:
                self._lose()
            else:
                self.process.kill()
        if self.process is not None:
            try:
                has_ended = self.process.watch()
            except DrafterProcessError as error:
                self._refuse(str(error))
                return
            if has_ended:
                self._untold = 0
                self._lose()
        if not self.is_there and now >= self._greet_at:
            self.greet()

    def receive(self) -> None:
        """Take in what has come; of each request's trees the newest is kept."""
        for message in drained(self.line.receive):
            self.requests.told_at = None
            self._take(message)

    def leave(self, why: str) -> None:
        """Say goodbye. A process of the engine's own ends; any other may stay, and be linked to again."""
        self.requests.forget_all()
        self.line.send(Bye(why))
        self.line.close()
        self.is_there = False
        if self.process is not None:
            self.process.dismiss()

    def state(self) -> dict[str, Any]:
        """In plain JSON types."""
        process, requests = self.process, self.requests
        counts = requests.counts
        return {
            "address": self.address,
            "is_there": self.is_there,
            "error": self.error,
            "window": requests.window,
            "fan_out": requests.fan_out,
            "own_plans": requests.num_own,
            "request_ids": None if requests.only is None else sorted(requests.only),
            "process": None if process is None else {"pid": process.pid, "restarts": process.restarts},
            "verdicts": counts.verdicts,
            "opened": counts.opened,
            "unfit": counts.unfit,
            "trees": counts.trees,
            "nodes": counts.nodes,
            "drafted": self.drafted,
            "busy_s": self.busy_s,
            "waited_s": self.waited_s,
            **asdict(requests.score),
            "requests": {
                request_id: {"name": following.name, **asdict(following.received.score)}
                for request_id, following in requests.open.items()
            },
        }

    def _take(self, message: Message) -> None:
        match message:
            case Drafts():
                self.requests.put(message)
            case Hello():
                self._greeted(message)
            case Bye():
                self.is_there = False
            case Beat():
                self.beats.append(message)
                self.drafted, self.busy_s = message.drafted, self.busy_s + message.busy_ms / 1e3

    def _greeted(self, hello: Hello) -> None:
        # it has begun anew; two greetings may cross, and what was opened between them is closed as well
        self.requests.forget_all()
        if self.process is not None:
            self.process.is_ready = True
        noise = NoiseKind.of(hello)
        if hello.vocab_size != self._vocab_size:
            self._refuse(f"its vocabulary has {hello.vocab_size} tokens, the target's {self._vocab_size}")
        elif noise == self._noise:
            self.is_there, self.error, self._patience_s = True, "", _FIRST_PATIENCE_S
            self._untold = 0
        elif noise.noise is Noise.NONE or self._untold >= _MOST_UNTOLD:
            patience_s = self._patience_s
            self._refuse(f"the target's noise is {self._noise}, which it does not know: it says {noise}")
            self._patience_s = patience_s  # it may be begun anew, and know better: it is asked ever more seldom
        else:
            # it has not heard yet what the seeds of this target are
            self._untold += 1
            self._lose()
            self.greet()

    def _lose(self) -> None:
        """It is gone, or may be. What it was told of is opened anew once it is back."""
        self.is_there, self.requests.told_at, self._patience_s = False, None, _FIRST_PATIENCE_S
        self.requests.forget_all()

    def _refuse(self, why: str) -> None:
        """It is no drafter for this engine. That is no failure of ours: requests go on without it."""
        self._lose()
        if self.process is not None:
            self.process.dismiss()  # nobody else would use it, and its model is loaded
        if why != self.error:
            logger.warning("Spec rollout: drafter `%s` drafts no more: %s", self.name, why)
        self.error = why
