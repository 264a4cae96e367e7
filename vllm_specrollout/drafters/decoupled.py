"""The `decoupled` drafter: a model in a process of its own, which drafts ahead while the target verifies.

What belongs here: what is told to that process and when, and what of its drafts is proposed. It never waits: what has
come is proposed, and a request for which nothing has come decodes plainly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_specrollout.decoupled.child import DrafterProcess
from vllm_specrollout.decoupled.mailbox import Mailbox
from vllm_specrollout.decoupled.messages import Beat, Bye, Close, Drafts, Hello, Message, Open, Verdict
from vllm_specrollout.decoupled.received import Fitting, Received, together
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.types import DraftLimits, FinishedRequest, RequestBatch, RequestView, TreeBatch, empty_trees

SILENCE = 64
"""Verdicts without an answer after which a stream is opened anew: it was preempted, or messages of its are lost."""
HANG_S = 30.0
"""Seconds without an answer after which a process counts as hanging, and is killed and begun anew."""
_BEATS, _RANKS = 600, 1 << 16  # kept
_OVERLAP = 8  # tokens before the new ones that a verdict repeats, in case that the last one is lost


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen, as far as a drafter follows it."""

    # 0.0: the best token is taken
    temperature: float
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0


class TargetNoise(Protocol):
    """What an engine knows of its requests that a drafter elsewhere needs."""

    def sampling(self, request_id: str) -> Sampling:
        """How the request's tokens are chosen."""
        ...

    def seeds(self, request_id: str, count: int) -> npt.NDArray[np.int64]:
        """[count] the noise of its next tokens; empty where it has none."""
        ...


@dataclass(slots=True)
class Following:
    """A request that is drafted for elsewhere."""

    handle: int
    # tokens that the drafter was told of
    num_told: int
    # verdicts since something came
    silent: int = 0
    received: Received = field(default_factory=Received)


@dataclass(slots=True)
class Counts:
    """What happened so far, for statistics."""

    verdicts: int = 0
    opened: int = 0
    trees: int = 0
    nodes: int = 0


class DecoupledDrafter(BaseDrafter):
    """Proposes what has arrived.

    Args:
        mailbox: to the drafter's process.
        noise: of the engine.
        source: index of the drafter; alternatives count as the next one.
        window: tokens of a window: the process drafts two of them ahead at most.
        fan_out: tokens per position: the stream's own and alternatives.
        vocab_size: the target's.
        process: the one that the engine has begun; None: it was begun by hand.
        clock: seconds, from any zero.
    """

    name = "decoupled"
    num_sources = 2
    works_ahead = True

    def __init__(
        self,
        mailbox: Mailbox,
        noise: TargetNoise,
        source: int,
        *,
        window: int,
        fan_out: int,
        vocab_size: int,
        process: DrafterProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mailbox = mailbox
        self.source = source
        self.window, self.fan_out = window, fan_out
        self.counts = Counts()
        self.is_there = False
        """Whether the process has said that it is ready."""
        self._noise = noise
        self._vocab_size = vocab_size
        self._process, self._clock = process, clock
        # when it was told something that it has not answered yet
        self._told_at: float | None = None
        self._requests: dict[str, Following] = {}
        self._by_handle: dict[int, Following] = {}
        self._next_handle = 1
        # as `Received.ranks`, of requests that are over, one behind another
        self.ranks: deque[int] = deque(maxlen=_RANKS)
        self.beats: deque[Beat] = deque(maxlen=_BEATS)
        """What the process did, about a second each, newest last."""

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.receive()
        self._watch()
        if not self.is_there:
            return empty_trees(batch.request_ids)
        limited = zip(
            limits.wanted(self.source).tolist(), limits.max_depth.tolist(), limits.is_chain.tolist(), strict=True
        )
        drafts: list[Fitting | None] = []
        for view, (count, depth, is_chain) in zip(batch.views, limited, strict=True):
            following = self._requests.get(view.request_id)
            if following is None:
                self._open(view)
                drafts.append(None)
                continue
            self._tell(view, following)
            drafts.append(following.received.fitting(view.token_ids, count, depth, is_chain) if count else None)
        trees = together(batch.request_ids, drafts, self.source)
        self.counts.nodes += trees.num_nodes
        return trees

    def finish(self, ending: FinishedRequest) -> None:
        self.forget(ending.request_id)

    def forget(self, request_id: str) -> None:
        following = self._requests.pop(request_id, None)
        if following is not None:
            del self._by_handle[following.handle]
            self.ranks.extend(following.received.ranks)
            self.mailbox.send(Close(following.handle))

    def close(self) -> None:
        """The engine ends."""
        self.mailbox.send(Bye("the engine ends"))
        if self._process is not None:
            self._process.stop()
        self.mailbox.close()

    def _watch(self) -> None:
        """Look after the process."""
        if self._process is None:
            return
        if self.is_there and self._told_at is not None and self._clock() - self._told_at > HANG_S:
            self._process.kill()
        if self._process.watch():
            self.is_there = False
            self._told_at = None

    # --- messages ----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take in what has come."""
        for message in self.mailbox.receive():
            self._told_at = None
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Drafts():
                following = self._by_handle.get(message.handle)
                # anything may come out of another process; a token that the target does not have is never verified
                if following is not None and bool((message.token_ids < self._vocab_size).all()):
                    following.received.put(message)
                    following.silent = 0
                    self.counts.trees += 1
            case Hello():
                # it has begun anew; two greetings may cross, and what was opened between them is closed as well
                for name in list(self._requests):
                    self.forget(name)
                self.is_there = message.vocab_size == self._vocab_size
            case Bye():
                self.is_there = False
            case Beat():
                self.beats.append(message)

    def _open(self, view: RequestView) -> None:
        sampling = self._noise.sampling(view.request_id)
        tokens = np.array(view.token_ids, dtype=np.int32)
        handle = self._next_handle
        told = self.mailbox.send(
            Open(
                handle=handle,
                generation=0,
                token_ids=tokens,
                seeds=self._seeds(view),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                max_tokens=view.max_new_tokens,
                window=self.window,
                fan_out=self.fan_out,
            )
        )
        if told:
            self._next_handle += 1
            following = Following(handle, len(tokens))
            self._requests[view.request_id] = self._by_handle[handle] = following
            self.counts.opened += 1

    def _tell(self, view: RequestView, following: Following) -> None:
        """What the request's tokens are by now."""
        num_tokens = len(view.token_ids)
        if num_tokens == following.num_told:
            return
        following.silent += 1
        if following.silent > SILENCE:
            self.forget(view.request_id)  # opened anew in the next step
            return
        begin = max(min(following.num_told, num_tokens) - _OVERLAP, 0)
        told = self.mailbox.send(
            Verdict(
                handle=following.handle,
                generation=0,
                num_tokens=num_tokens,
                token_ids=np.array(view.token_ids[begin:], dtype=np.int32),
                seeds=self._seeds(view),
                first_seed=num_tokens,
                window=self.window,
                fan_out=self.fan_out,
            )
        )
        if told:
            if self._told_at is None:
                self._told_at = self._clock()
            following.num_told = num_tokens
            self.counts.verdicts += 1

    def _seeds(self, view: RequestView) -> npt.NDArray[np.int64]:
        """The noise of all positions that may be drafted before the next verdict comes."""
        count = min(3 * self.window + 1, view.max_new_tokens)
        return self._noise.seeds(view.request_id, count)
