"""Serving of drafts: a model's engine, the lines that it drafts, and the engines that they are drafted for. Pure.

What belongs here: who is drafted for, what the engine is asked for in each pass, and what is sent. The engine and the
mail are given. One process drafts for any number of engines at once; a pass is shared by all their requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vllm_specrollout.cluster.line import Ask, Line, NoiseTrial, Survival, Tree, branches
from vllm_specrollout.cluster.mail import MailServer
from vllm_specrollout.cluster.messages import (
    MOST_REQUESTS,
    VERSION,
    Bye,
    DraftUpdate,
    Hello,
    Message,
    Opened,
    Rest,
    Sampling,
    VerifierUpdate,
    Work,
    ints,
    longs,
)

BEAT_S = 1.0
"""Seconds after which an engine that speaks hears something, if there are no drafts for it."""
FORGET_S = 60.0
"""Seconds of silence after which an engine with open requests is taken to be gone. One that comes back is greeted."""
MOST_ENGINES = 256
_IDLE_S = 0.2  # longest wait for a message; whether the process should end is asked as often


@dataclass(frozen=True, slots=True)
class Grown:
    """A request's next token."""

    name: str
    # [width] the token first, then the likeliest others, best first
    token_ids: Sequence[int]
    # [width] their log probabilities before temperature
    log_probs: Sequence[float]
    # the likeliest of all
    best: int
    # the request is over: it has all the tokens that it was asked for
    is_over: bool


class DraftEngine(Protocol):
    """An engine that decodes; worker/drafter_engine.py has the real one."""

    # folder or name; and what it runs on
    model: str
    device: str
    vocab_size: int
    max_requests: int
    most_tokens: int

    def add(self, ask: Ask, sampling: Sampling) -> None: ...

    def abort(self, names: Sequence[str]) -> None: ...

    def step(self) -> list[Grown]:
        """One pass of all its requests."""

    def sleep(self) -> None:
        """Give memory back; it has no requests."""

    def wake(self) -> None: ...


@dataclass(slots=True)
class Target:
    """An engine that is drafted for."""

    heard_at: float
    fan_out: int = 1
    # by the engine's handles
    lines: dict[int, Line] = field(default_factory=dict)
    # of lines that are over; and all that was done, as the engine knows it
    gone: Work = Work()
    told: Work = Work()
    told_at: float = 0.0
    # whether it has said anything since it was told of anything
    waits: bool = False


class Serving:
    """
    Args:
        is_over: asked each time around: whether the process should end.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        engine: DraftEngine,
        office: MailServer,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.targets: dict[bytes, Target] = {}
        self.work = Work()
        """Since the process began, for all."""
        self.is_asleep = False
        self.noise, self._survival = NoiseTrial(), Survival()
        self._engine, self._office, self._is_over, self._clock = engine, office, is_over, clock
        # request of the engine -> whose it is
        self._asked: dict[str, tuple[Target, Line]] = {}
        self._count = 0

    def run(self) -> None:
        """Until the process should end."""
        while not self._is_over():
            self.turn()
        for name in self.targets:
            self._office.send(name, Bye("the drafter ends"))

    def turn(self) -> None:
        """Once around: what was said, a pass, and what came of it."""
        for name, message in self._office.receive():
            self._take(name, message)
        begin = self._clock()
        self._ask()
        if self._asked:
            streams = self._pass()
            self.work += Work((self._clock() - begin) * 1e3, 1, streams)
        else:
            self._office.wait(_IDLE_S)
        self._send()

    # --- what engines say --------------------------------------------------------------------------------------------

    def _take(self, name: bytes, message: Message) -> None:
        now = self._clock()
        if isinstance(message, Hello):
            self._meet(name)
        elif isinstance(message, Bye):
            self._forget(name)
        elif isinstance(message, Rest):
            self.rest(message.is_asleep)
            self._office.send(name, message)
        elif isinstance(message, VerifierUpdate):
            target = self.targets.get(name)
            if target is None:
                # it was drafted for in a former life of this process, or was taken to be gone
                self._meet(name)
                return
            target.heard_at, target.fan_out, target.waits = now, message.fan_out, True
            self._told(target, message)

    def rest(self, is_asleep: bool) -> None:
        """Asleep it drafts for nobody, and the engines that it serves still hear that it lives."""
        if is_asleep == self.is_asleep:
            return
        self.is_asleep = is_asleep
        if is_asleep:
            for target in self.targets.values():
                for handle in list(target.lines):
                    self._close(target, handle)
            self._engine.sleep()
        else:
            self._engine.wake()
            for name in list(self.targets):
                self._meet(name)  # what they opened meanwhile is opened again

    def _meet(self, name: bytes) -> None:
        """Begin anew with an engine: it opens its requests once it hears the greeting."""
        self._forget(name)
        if len(self.targets) < MOST_ENGINES:
            now = self._clock()
            self.targets[name] = Target(now, told=self.work, told_at=now)
            own = self._engine
            self._office.send(name, Hello(VERSION, own.vocab_size, own.model, own.device))

    def _told(self, target: Target, told: VerifierUpdate) -> None:
        for handle in longs(told.closed).tolist():
            self._close(target, handle)
        for opened in told.opened:
            self._open(target, opened)
        handles, counts = longs(told.handles).tolist(), ints(told.counts)
        tokens, ends = ints(told.token_ids), np.cumsum(counts).tolist()
        for handle, count, end in zip(handles, counts.tolist(), ends, strict=True):
            line = target.lines.get(handle)
            if line is None:
                continue
            new = tokens[end - count : end].tolist()
            if max(new) >= self._engine.vocab_size or len(line.tokens) + count > self._engine.most_tokens:
                self._close(target, handle)
                continue
            self._abort(line, line.take(new, told.window))

    def _open(self, target: Target, opened: Opened) -> None:
        self._close(target, opened.handle)
        if self.is_asleep:
            return
        tokens = ints(opened.token_ids).tolist()
        lines = sum(len(one.lines) for one in self.targets.values())
        if max(tokens) >= self._engine.vocab_size or len(tokens) > self._engine.most_tokens or lines >= MOST_REQUESTS:
            return  # longer than this model can see, or one too many: the request goes on without its drafts
        self._count += 1
        target.lines[opened.handle] = Line(
            str(self._count),
            tokens,
            opened.sampling,
            prompt_tokens=opened.prompt_tokens,
            max_tokens=opened.max_tokens,
            most_tokens=self._engine.most_tokens,
            window=opened.window,
            survival=self._survival,
            noise=self.noise,
        )

    def _close(self, target: Target, handle: int) -> None:
        line = target.lines.pop(handle, None)
        if line is not None:
            target.gone += Work(drafted=line.drafted, wasted=line.wasted)
            self._abort(line, list(line.tips))

    def _forget(self, name: bytes) -> None:
        target = self.targets.pop(name, None)
        if target is not None:
            for handle in list(target.lines):
                self._close(target, handle)

    # --- the pass ----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Begin requests where something may be drafted that nobody drafts, as far as the engine has places."""
        lines = [(target, line) for target in self.targets.values() for line in target.lines.values()]
        most, places = branches(len(lines)), self._engine.max_requests - len(self._asked)
        # those that have none come first: the others are served already
        for target, line in sorted(lines, key=lambda pair: len(pair[1].tips)):
            if places <= 0:
                return
            for ask in line.wanted(min(most, len(line.tips) + places)):
                self._engine.add(ask, line.sampling)
                self._asked[ask.name] = target, line
                places -= 1

    def _pass(self) -> int:
        """One pass; of how many requests."""
        streams = len({id(line) for _, line in self._asked.values()})
        for grown in self._engine.step():
            if grown.name not in self._asked:
                continue  # aborted meanwhile
            target, line = self._asked[grown.name]
            log_q = _scaled(grown.log_probs, line.sampling.temperature)[: target.fan_out]
            goes_on = line.grow(grown.name, grown.token_ids[: target.fan_out], log_q, grown.best)
            if grown.is_over:
                line.end(grown.name)
                del self._asked[grown.name]
            elif not goes_on:
                self._abort(line, [grown.name])
        return streams

    def _abort(self, line: Line, names: Sequence[str]) -> None:
        if names:
            self._engine.abort(names)
        for name in names:
            line.end(name)
            del self._asked[name]

    # --- what engines hear -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        now = self._clock()
        for name, target in list(self.targets.items()):
            if target.lines and now - target.heard_at > FORGET_S:
                self._forget(name)
                continue
            due = [(handle, tree) for handle, line in target.lines.items() if (tree := line.due()) is not None]
            if due or (target.waits and now - target.told_at >= BEAT_S):
                if not self._office.send(name, self._drafted(target, due)):
                    self._forget(name)
                    continue
                target.told_at, target.waits = now, False

    def _drafted(self, target: Target, due: Sequence[tuple[int, Tree]]) -> DraftUpdate:
        trees = [tree for _, tree in due]
        starts = np.concatenate([[0], np.cumsum([len(tree.token_ids) for tree in trees])])
        done = self.work + target.gone
        for line in target.lines.values():
            done += Work(drafted=line.drafted, wasted=line.wasted)
        work, target.told = done - target.told, done
        return DraftUpdate(
            np.array([handle for handle, _ in due], np.int64).tobytes(),
            np.array([tree.position for tree in trees], np.int32).tobytes(),
            starts.astype(np.int32).tobytes(),
            b"".join(tree.token_ids.tobytes() for tree in trees),
            b"".join(tree.parents.tobytes() for tree in trees),
            b"".join(tree.ranks.astype(np.uint8).tobytes() for tree in trees),
            b"".join(tree.log_q.tobytes() for tree in trees),
            work,
        )


def _scaled(log_probs: Sequence[float], temperature: float) -> list[float]:
    """Log probabilities at a temperature, of what is left of the distribution: the tokens that are known."""
    if temperature in (0.0, 1.0):
        return list(log_probs)
    scaled = [value / temperature for value in log_probs]
    highest = max(scaled)
    total = highest + math.log(sum(math.exp(value - highest) for value in scaled))
    return [value - total for value in scaled]
