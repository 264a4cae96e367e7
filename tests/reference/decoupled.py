"""A drafter elsewhere and its verifier, without engines: what decoupled drafting must do, step by step.

The target's tokens are a function of request and position, and so is what a drafter thinks of them. Each step, the
verifier samples one token more than it accepts; the drafter computes one token per turn and stream.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from vllm_specrollout.cluster.counter import TAPE, NoiseKind
from vllm_specrollout.cluster.following import Sampling
from vllm_specrollout.cluster.loop import Work
from vllm_specrollout.cluster.mailbox import Mailbox
from vllm_specrollout.cluster.messages import Close, Drafts, Message, Open, Pace, Verdict, validate
from vllm_specrollout.cluster.stream import Choices, Stream, Survival

VOCABULARY = 50


@functools.cache
def token_at(request: int, position: int) -> int:
    """What the target samples there, whatever stands before: sampling is not what is tested."""
    return random.Random(f"{request} {position}").randrange(VOCABULARY)


class Line:
    """Two mailboxes and what lies between: messages may be late, lost or doubled.

    Args:
        chance: of each fault, per message; 0.0: none.
    """

    def __init__(self, rng: random.Random, chance: float = 0.0) -> None:
        self.rng, self.chance = rng, chance
        ways = (deque[tuple[int, Message]](), deque[tuple[int, Message]]())
        self.ends = (End(self, ways[0], ways[1]), End(self, ways[1], ways[0]))

    def reopened(self) -> End:
        """The verifier's end, opened anew: of what was said before, nothing comes any more."""
        old, drafters = self.ends
        old.own.clear()
        self.ends = (End(self, old.own, old.other, session=old.session + 1), drafters)
        return self.ends[0]


@dataclass
class End:
    """One side's mailbox."""

    line: Line
    # (session of the end that sent it, message)
    own: deque[tuple[int, Message]]
    other: deque[tuple[int, Message]]
    session: int = 0
    # the other end's newest
    peer: int = 0
    address: str = "line"
    stats: object = None
    is_closed: bool = False

    def send(self, message: Message) -> bool:
        assert not self.is_closed
        validate(message)
        rng, chance = self.line.rng, self.line.chance
        if rng.random() < chance:
            return rng.random() < 0.5  # lost, or refused
        self.other.append((self.session, message))
        if rng.random() < chance:
            self.other.append((self.session, message))
        return True

    def receive(self, most: int = 256) -> list[Message]:
        rng, taken = self.line.rng, []
        while self.own and len(taken) < most and not rng.random() < self.line.chance:
            taken.append(self.own.popleft())
        if rng.random() < self.line.chance:
            rng.shuffle(taken)
        found = []
        for session, message in taken:
            self.peer = max(self.peer, session)
            if session == self.peer:
                found.append(message)
        return found

    def wait(self, timeout_s: float) -> bool:
        return bool(self.own)

    def close(self) -> None:
        self.is_closed = True


class Faulty:
    """A mailbox in front of which messages are lost, late, doubled and shuffled, both ways.

    Args:
        chance: of each fault, per message.
    """

    def __init__(self, mailbox: Mailbox, rng: random.Random, chance: float) -> None:
        self.mailbox, self.rng, self.chance = mailbox, rng, chance
        self.address = mailbox.address
        # on their way to this end
        self.late: list[Message] = []

    def send(self, message: Message) -> bool:
        if self.rng.random() < self.chance:
            return self.rng.random() < 0.5  # lost, or refused
        if self.rng.random() < self.chance:
            self.mailbox.send(message)
        return self.mailbox.send(message)

    def receive(self, most: int = 256) -> list[Message]:
        rng, found = self.rng, self.late + self.mailbox.receive(most)
        times = [rng.choice((0, 2)) if rng.random() < self.chance else 1 for _ in found]
        found = [message for message, count in zip(found, times, strict=True) for _ in range(count)]
        if rng.random() < self.chance:
            rng.shuffle(found)
        kept = rng.randrange(len(found) + 1) if rng.random() < self.chance else len(found)
        self.late = found[kept:]
        return found[:kept]

    def close(self) -> None:
        self.mailbox.close()


@dataclass
class FakeEngine:
    """Drafts what the target samples, mostly.

    Args:
        accuracy: how often its first choice, and one of its two choices, is the target's token.
    """

    rng: random.Random
    accuracy: tuple[float, float] = (0.7, 0.85)
    vocab_size: int = VOCABULARY
    max_requests: int = 64
    most_tokens: int = 10_000
    drafted: int = 0
    work: Work = field(default_factory=Work)
    streams: dict[int, Stream] = field(default_factory=dict)
    # of each rejection: tokens wasted, and levels that the stream may have had
    wasted: list[tuple[int, int]] = field(default_factory=list)
    # handle -> levels that its stream may have: those that it was allowed when they were drafted, less what holds now
    levels: dict[int, int] = field(default_factory=dict)
    # what the verifier said of its seeds
    noise: NoiseKind = TAPE

    @property
    def may_draft(self) -> bool:
        return any(stream.may_draft for stream in self.streams.values())

    def meet(self, noise: NoiseKind) -> None:
        assert not self.streams
        self.noise = noise

    def take(self, message: Message) -> None:
        if isinstance(message, Open):
            self.streams[message.handle] = Stream(message, self.most_tokens, 16, Survival(), self.noise.noise)
            self.levels[message.handle] = allowed(message)
        elif isinstance(message, Close):
            self.streams.pop(message.handle, None)
        elif isinstance(message, Verdict) and message.handle in self.streams:
            stream = self.streams[message.handle]
            before, misses, levels = stream.wasted, stream.generation, self.levels[message.handle]
            held = len(stream.take(message))
            if not held:
                return
            if stream.generation > misses:
                assert stream.generation == misses + 1, "one verdict leaves the stream once"
                self.wasted.append((stream.wasted - before, levels))
            # an exit that was taken may have as many levels behind it as the stream had
            self.levels[message.handle] = max(allowed(message), levels - held)
            assert stream.depth <= self.levels[message.handle], "deeper than it was ever allowed"

    def step(self) -> list[Drafts]:
        due = []
        for stream in self.streams.values():
            if stream.may_draft:
                look, before = stream.look(), stream.drafted
                stream.grow([self._choices(stream, depth) for depth in look.depths])
                self.drafted += stream.drafted - before
            drafts = stream.due()
            if drafts is not None:
                due.append(drafts)
        return due

    def close_all(self) -> None:
        self.streams.clear()
        self.levels.clear()

    def _choices(self, stream: Stream, depth: int) -> Choices:
        # the seed says whose position it is; one that is counted from, whose request
        request, position = divmod(int(stream.seed(depth) or 0), 1 << 20)
        if self.noise != TAPE:
            position = stream.place(depth) + 1
        token = token_at(request, position)
        others = [(token + 1 + i) % VOCABULARY for i in range(7)]
        drawn = self.rng.random()
        place = 0 if drawn < self.accuracy[0] else 1 if drawn < self.accuracy[1] else len(others)
        tokens = [*others[:place], token, *others[place:]][: stream.fan_out]
        first, second = self.accuracy[0], self.accuracy[1] - self.accuracy[0]
        return Choices(tokens, [math.log(max(q, 1e-3)) for q in (first, second, *(0.01,) * 6)[: len(tokens)]])


def allowed(message: Open | Verdict) -> int:
    """Levels that a stream may have from now on: a window if it is coupled, two if it goes ahead."""
    return message.window * (2 if message.pace is Pace.DECOUPLED else 1)


class FakeNoise:
    """Requests are called by their number; a position's seed says which it is; so does a request's, if counted."""

    def __init__(self, kind: NoiseKind = TAPE) -> None:
        self.kind = kind
        self.lengths: dict[str, int] = {}

    def sampling(self, request_id: str) -> Sampling:
        return Sampling(1.0)

    def seeds(self, request_id: str, count: int) -> np.ndarray:
        if self.kind != TAPE:
            return np.array([int(request_id) << 20], dtype=np.int64)
        begin = (int(request_id) << 20) + self.lengths[request_id]
        return np.arange(begin, begin + count, dtype=np.int64)
