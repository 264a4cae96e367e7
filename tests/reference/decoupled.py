"""A drafter elsewhere and the engines that it drafts for, without engines: what decoupled drafting must do.

The target's tokens are a function of request and position, and so is what a drafter thinks of them. Each step, a target
samples one token more than it accepts; the drafter computes one token per pass and request.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_specrollout.cluster.line import Ask
from vllm_specrollout.cluster.messages import Message, MessageError, Sampling, decode, encode
from vllm_specrollout.cluster.serving import Grown

VOCABULARY = 50


@functools.cache
def token_at(request: int, position: int) -> int:
    """What the target samples there, whatever stands before: sampling is not what is tested."""
    return random.Random(f"{request} {position}").randrange(VOCABULARY)


def sampling(request_id: str) -> Sampling:
    """Requests are called by their number, and a seed says whose request it is."""
    return Sampling(1.0, seed=int(request_id))


class Wire:
    """Mail between engines and one drafter: late, cut where an end begins anew, and refused where too much waits.

    Args:
        late: probability that a message waits until the next look.
        most: messages that wait each way, at most.
    """

    def __init__(self, rng: random.Random, late: float = 0.0, most: int = 64) -> None:
        self.rng, self.late, self.most = rng, late, most
        self.to_drafter: deque[tuple[bytes, bytes]] = deque()
        self.to_engine: dict[bytes, deque[bytes]] = {}
        self.malformed = 0

    def box(self, name: str) -> Box:
        """An engine's end, begun anew: of what was said to the last one of its name nothing comes any more."""
        own = f"{name} {self.rng.random()}".encode()
        self.to_engine[own] = deque()
        return Box(self, own)

    # the drafter's end

    def receive(self) -> Iterable[tuple[bytes, Message]]:
        while self.to_drafter and self.rng.random() >= self.late:
            name, data = self.to_drafter.popleft()
            try:
                yield name, decode(data)
            except MessageError:
                self.malformed += 1

    def send(self, engine: bytes, message: Message) -> bool:
        waiting = self.to_engine.get(engine)
        if waiting is None or len(waiting) >= self.most:
            return False
        waiting.append(encode(message))
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self.to_drafter)


@dataclass
class Box:
    """An engine's end."""

    wire: Wire
    name: bytes
    address: str = "wire"

    def receive(self) -> Iterable[Message]:
        waiting = self.wire.to_engine.get(self.name, deque())
        while waiting and self.wire.rng.random() >= self.wire.late:
            yield decode(waiting.popleft())

    def send(self, message: Message) -> bool:
        if len(self.wire.to_drafter) >= self.wire.most:
            return False
        self.wire.to_drafter.append((self.name, encode(message)))
        return True

    def close(self) -> None:
        self.wire.to_engine.pop(self.name, None)


@dataclass
class FakeEngine:
    """Draws what the target samples, mostly.

    Args:
        accuracy: how often its first choice, and one of its two choices, is the target's token.
    """

    rng: random.Random
    accuracy: tuple[float, float] = (0.7, 0.85)
    model: str = "small"
    device: str = "a core"
    vocab_size: int = VOCABULARY
    max_requests: int = 64
    most_tokens: int = 10_000
    running: dict[str, tuple[Sampling, int, int]] = field(default_factory=dict)
    asked: int = 0
    is_asleep: bool = False

    def add(self, ask: Ask, sampling: Sampling) -> None:
        assert not self.is_asleep
        assert ask.name not in self.running and ask.max_tokens > 0
        assert len(ask.token_ids) + ask.max_tokens <= self.most_tokens + 1
        assert len(self.running) < self.max_requests
        self.running[ask.name] = sampling, len(ask.token_ids), ask.max_tokens
        self.asked += 1

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.running[name]

    def step(self) -> list[Grown]:
        found = []
        for name, (sampling, position, left) in list(self.running.items()):
            assert sampling.seed is not None
            tokens, log_probs = self._choices(sampling.seed, position)
            found.append(Grown(name, tokens, log_probs, tokens[0], left == 1))
            self.running[name] = sampling, position + 1, left - 1
            if left == 1:
                del self.running[name]
        return found

    def sleep(self) -> None:
        assert not self.running and not self.is_asleep, "nothing that it would lose"
        self.is_asleep = True

    def wake(self) -> None:
        assert self.is_asleep
        self.is_asleep = False

    def _choices(self, request: int, position: int) -> tuple[list[int], list[float]]:
        token = token_at(request, position)
        others = [(token + 1 + i) % VOCABULARY for i in range(7)]
        drawn = self.rng.random()
        place = 0 if drawn < self.accuracy[0] else 1 if drawn < self.accuracy[1] else len(others)
        tokens = [*others[:place], token, *others[place:]]
        first, second = self.accuracy[0], self.accuracy[1] - self.accuracy[0]
        return tokens, [math.log(max(q, 1e-3)) for q in (first, second, *(0.01,) * 6)]
