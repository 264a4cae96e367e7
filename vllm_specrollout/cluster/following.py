"""The requests that a drafter elsewhere follows. Pure: its mailbox and the engine's noise are given.

What belongs here: what that drafter is told of each request and when, and what of its drafts is one of theirs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_specrollout.cluster.counter import NoiseKind
from vllm_specrollout.cluster.messages import Close, Drafts, Message, MessageError, Open, Pace, Verdict
from vllm_specrollout.cluster.rates import Mode
from vllm_specrollout.cluster.received import Fitting, Received, Score
from vllm_specrollout.types import IntArray, RequestView

logger = logging.getLogger("vllm.specrollout")

SILENCE = 64
"""Verdicts without an answer after which a stream is opened anew: it was preempted, or messages of its are lost."""
_RANKS = 1 << 16  # kept
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

    @property
    def kind(self) -> NoiseKind:
        """What `seeds` gives; it never changes."""
        ...

    def sampling(self, request_id: str) -> Sampling:
        """How the request's tokens are chosen."""
        ...

    def seeds(self, request_id: str, count: int) -> npt.NDArray[np.int64]:
        """[count] the noise of its next tokens, or [1] what all of it is counted from; empty where it has none."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What one request is given: w_r and m_r."""

    window: int
    # coupled: its drafter waits for the verdict on each window
    mode: Mode


@dataclass(frozen=True, slots=True)
class MatchCounts:
    """What was drafted for each running request lately, and how much of it the target sampled itself."""

    request_ids: tuple[str, ...]
    # [R] int32, drafted tokens that the target got to: those that matched, and each first one that did not
    tried: IntArray
    # [R] int32
    matched: IntArray


@dataclass(slots=True)
class Following:
    """A request that is drafted for elsewhere."""

    handle: int
    # that its client knows it by
    name: str
    # tokens that the drafter was told of
    num_told: int
    received: Received = field(default_factory=Received)
    # verdicts since something came
    silent: int = 0


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    verdicts: int = 0
    opened: int = 0
    trees: int = 0
    nodes: int = 0  # proposed
    unfit: int = 0  # requests that no message can say
    over: Score = Score()  # of requests that are over


class Requests:
    """Those of one engine that one drafter follows.

    Args:
        send: to the drafter; False: it could not be told.
        noise: of the engine.
        window: tokens of a window, for requests without a plan of their own: the process drafts two of them ahead at
            most.
        fan_out: tokens per position: the stream's own and alternatives.
        vocab_size: the target's.
        only: those that it may follow, by the engine's names or their clients'; None: all.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        send: Callable[[Message], bool],
        noise: TargetNoise,
        *,
        window: int,
        fan_out: int,
        vocab_size: int,
        only: Iterable[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window, self.fan_out = window, fan_out
        self.plans: Mapping[str, OwnPlan] = {}
        """Requests, by the engine's names, with a window and a mode of their own; the others go ahead in `window`."""
        self.counts = Counts()
        self.ranks: deque[int] = deque(maxlen=_RANKS)
        """As `Received.ranks`, of requests that are over, one behind another."""
        self.only = None if only is None else frozenset(only)
        self.told_at: float | None = None
        """When the drafter was told something that it has not answered yet."""
        # by the engine's name
        self.open: dict[str, Following] = {}
        self._by_handle: dict[int, Following] = {}
        # requests that run, and that no message can say: longer than one may be
        self._unfit: set[str] = set()
        self._next_handle = 1
        self._send, self._noise, self._vocab_size, self._clock = send, noise, vocab_size, clock

    def includes(self, view: RequestView) -> bool:
        """Whether the request is one of those that it may follow."""
        return self.only is None or view.request_id in self.only or view.name in self.only

    def restrict(self, only: Iterable[str] | None) -> None:
        """To these from now on; None: all."""
        self.only = None if only is None else frozenset(only)
        for request_id, following in list(self.open.items()):
            if self.only is not None and not {request_id, following.name} & self.only:
                self.forget(request_id)

    def propose(self, view: RequestView, most: int, most_depth: int, is_chain: bool) -> Fitting | None:
        """Tell the drafter how the request stands; what of its drafts may be verified next, as `Received.fitting`."""
        following = self.open.get(view.request_id)
        if following is None:
            self._attempt(self._open, view)
            return None
        self._attempt(self._tell, view, following)
        fitting = following.received.fitting(view.token_ids, most, most_depth, is_chain)
        if fitting is not None:
            self.counts.nodes += len(fitting.token_ids)
        return fitting

    def put(self, drafts: Drafts) -> None:
        """A tree has come. Anything may come out of another process: tokens that the target does not have, too."""
        following = self._by_handle.get(drafts.handle)
        if not len(drafts.token_ids):
            # asked whether it still runs; that the drafter knows of it says nothing of its drafts
            if following is None:
                self._send(Close(drafts.handle))
        elif following is not None and bool((drafts.token_ids < self._vocab_size).all()):
            following.received.put(drafts)
            following.silent = 0
            self.counts.trees += 1

    def forget(self, request_id: str) -> None:
        """The request is over, or drafted for elsewhere."""
        self._unfit.discard(request_id)
        following = self.open.pop(request_id, None)
        if following is not None:
            del self._by_handle[following.handle]
            self.counts.over += following.received.score
            self.ranks.extend(following.received.ranks)
            self._send(Close(following.handle))

    def forget_all(self) -> None:
        for request_id in list(self.open):
            self.forget(request_id)

    @property
    def num_own(self) -> int:
        """Requests that run, and have a plan of their own."""
        return len(self.open.keys() & self.plans.keys())

    def match_counts(self) -> MatchCounts:
        """How the drafts of those that run fared."""
        scores = [following.received.score for following in self.open.values()]
        return MatchCounts(
            tuple(self.open),
            np.array([score.tried for score in scores], dtype=np.int32),
            np.array([score.matched for score in scores], dtype=np.int32),
        )

    @property
    def score(self) -> Score:
        """How its drafts fared, in requests that run and in those that are over."""
        return sum((following.received.score for following in self.open.values()), self.counts.over)

    @property
    def wasted(self) -> int:
        """As in `score`, without counting the rest."""
        return self.counts.over.wasted + sum(following.received.wasted for following in self.open.values())

    def _attempt(self, tell: Callable[..., None], view: RequestView, *more: Following) -> None:
        """Tell the drafter of a request, unless no message can. Such a request goes on without its drafts, alone."""
        if view.request_id in self._unfit:
            return
        try:
            tell(view, *more)
        except MessageError as error:
            self.forget(view.request_id)
            self._unfit.add(view.request_id)
            self.counts.unfit += 1
            if self.counts.unfit == 1:
                logger.warning("Spec rollout: a request decodes plainly, and others like it will: %s", error)

    def _open(self, view: RequestView) -> None:
        sampling = self._noise.sampling(view.request_id)
        window, pace = self._plan(view)
        tokens = np.array(view.token_ids, dtype=np.int32)
        handle = self._next_handle
        told = self._send(
            Open(
                handle=handle,
                generation=0,
                token_ids=tokens,
                seeds=self._seeds(view, window),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                max_tokens=view.max_new_tokens,
                window=window,
                fan_out=self.fan_out,
                pace=pace,
            )
        )
        if told:
            self._next_handle += 1
            following = Following(handle, view.name, len(tokens))
            self.open[view.request_id] = self._by_handle[handle] = following
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
        window, pace = self._plan(view)
        begin = max(min(following.num_told, num_tokens) - _OVERLAP, 0)
        told = self._send(
            Verdict(
                handle=following.handle,
                generation=0,
                num_tokens=num_tokens,
                token_ids=np.array(view.token_ids[begin:], dtype=np.int32),
                seeds=self._seeds(view, window),
                first_seed=num_tokens,
                window=window,
                fan_out=self.fan_out,
                pace=pace,
            )
        )
        if told:
            if self.told_at is None:
                self.told_at = self._clock()
            following.num_told = num_tokens
            self.counts.verdicts += 1

    def _plan(self, view: RequestView) -> tuple[int, Pace]:
        """The request's window, and whether its stream waits for verdicts."""
        own = self.plans.get(view.request_id)
        if own is None:
            return self.window, Pace.DECOUPLED
        return own.window, Pace.COUPLED if own.mode is Mode.COUPLED else Pace.DECOUPLED

    def _seeds(self, view: RequestView, window: int) -> npt.NDArray[np.int64]:
        """The noise of all positions that may be drafted before the next verdict comes."""
        count = min(3 * window + 1, view.max_new_tokens)
        return self._noise.seeds(view.request_id, count)
