"""A link: what an engine has to do with one drafter elsewhere. Pure: its mail and the engine's requests are given.

What belongs here: whether that drafter is there, what it is told of each request, what of its drafts fits, and the
process behind it. Several links, and one tree out of theirs, are in drafters/decoupled.py. Nothing here waits, and
whatever the drafter does can at worst cost its drafts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.cluster.child import DrafterProcess, DrafterProcessError
from vllm_specrollout.cluster.mail import MailClient
from vllm_specrollout.cluster.messages import (
    MOST_BYTES,
    MOST_REQUESTS,
    VERSION,
    Bye,
    DraftUpdate,
    Hello,
    Opened,
    Sampling,
    VerifierUpdate,
    Work,
)
from vllm_specrollout.errors import logger
from vllm_specrollout.types import DraftLimits, IntArray, RequestBatch, RequestView, TreeBatch

HANG_S = 30.0
"""Seconds without an answer after which a drafter counts as hanging. A process of the engine's own is begun anew."""
_BEATS = 600  # kept
_BEAT_S = 1.0  # of work that is summed up
# seconds after which a drafter that has not answered is greeted again: at first, and at most
_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 64.0
_MOST_OPENED = MOST_BYTES // 8  # tokens of the requests that one message opens
_check_opened = msgspec.msgpack.Decoder(Opened).decode
_pack = msgspec.msgpack.Encoder().encode


SamplingOf = Callable[[str], Sampling]
"""From the engine's name of a request that runs."""


@dataclass(frozen=True, slots=True)
class Score:
    """How drafts fared, over the positions that the target came to along them."""

    # positions for which something was drafted
    tried: int = 0
    # the first choice was the target's own token
    matched: int = 0
    # one of the choices was
    covered: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.tried + other.tried, self.matched + other.matched, self.covered + other.covered)

    def __sub__(self, other: Score) -> Score:
        return Score(self.tried - other.tried, self.matched - other.matched, self.covered - other.covered)


@dataclass(slots=True)
class LinkCounts:
    """What happened so far."""

    verdicts: int = 0
    opened: int = 0
    trees: int = 0
    nodes: int = 0  # proposed
    unfit: int = 0  # requests that no message can say
    malformed: int = 0  # messages with trees that are none
    # by the drafter's own word: tokens of streams, and behind misses; seconds of work
    drafted: int = 0
    wasted: int = 0
    busy_s: float = 0.0
    over: Score = Score()  # of requests that are over


@dataclass(slots=True)
class Following:
    """A request that is drafted for elsewhere."""

    handle: int
    # that its client knows it by
    name: str


class Link:
    """One drafter elsewhere, and the requests that it follows.

    Args:
        name: what the engine calls it.
        mail: to the drafter.
        sampling: how the engine's requests are sampled.
        window: tokens of a window: two of them are drafted ahead at most.
        fan_out: tokens per position: the stream's own and alternatives.
        vocab_size: the target's.
        only: requests that it may follow, by the engine's names or their clients'; None: all.
        process: the one that the engine has begun; None: somebody else did.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        name: str,
        mail: MailClient,
        sampling: SamplingOf,
        *,
        window: int,
        fan_out: int,
        vocab_size: int,
        only: Iterable[str] | None = None,
        process: DrafterProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.address = name, mail.address
        self.window, self.fan_out, self.process = window, fan_out, process
        self.only = None if only is None else frozenset(only)
        # of as many drafters alike it has the requests of one
        self._share, self._sharers = 0, 1
        self.is_there = False
        """Whether the drafter has said that it is ready."""
        self.error = ""
        """Why it will not draft; empty: it does, or may yet."""
        self.counts = LinkCounts()
        self.open: dict[str, Following] = {}
        """By the engine's names."""
        self.model, self.device = "", ""
        """What drafts there, and on what, by the drafter's own word."""
        self.beats: deque[Work] = deque(maxlen=_BEATS)
        """What the drafter did, each in a second or so; the newest last."""
        self._mail, self._sampling, self._vocab_size, self._clock = mail, sampling, vocab_size, clock
        self._received = _core.Received()
        self._closed: list[int] = []
        # how drafts fared in requests that are over, as it was asked last
        self._asked = Score()
        # requests that run, and that no message can say
        self._unfit: set[str] = set()
        self._next_handle = 1
        # when the drafter was told something that it has not answered yet
        self._told_at: float | None = None
        self._beat, self._beat_at = Work(), clock()
        # when it is greeted again
        self._greet_at, self._patience_s = 0.0, _FIRST_PATIENCE_S

    # --- the drafter -------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Say that the engine is here; the drafter says the same once it is ready."""
        self._mail.send(Hello(VERSION, self._vocab_size))
        self._greet_at = self._clock() + self._patience_s
        self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)

    def watch(self) -> None:
        """Look after the drafter: whether it still lives, and whether it is to be greeted again."""
        if self.error:
            return
        now = self._clock()
        if self.is_there and self._told_at is not None and now - self._told_at > HANG_S:
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
                self._lose()
        if not self.is_there and now >= self._greet_at:
            self.greet()

    def receive(self) -> None:
        """Take in what has come; of each request's trees the newest is kept."""
        last: DraftUpdate | None = None
        for message in self._mail.receive():
            self._told_at = None
            # a drafter sends whole trees with each pass, several in a step: what brings the same ones again is enough
            if last is not None and not (isinstance(message, DraftUpdate) and message.handles == last.handles):
                self._put(last)
            last = None
            if isinstance(message, DraftUpdate):
                self._note(message)
                last = message
            elif isinstance(message, Hello):
                self._greeted(message)
            elif isinstance(message, Bye):
                self._lose()
        if last is not None:
            self._put(last)

    def leave(self, why: str) -> None:
        """Say goodbye. A process of the engine's own ends; any other stays, and may be linked to again."""
        self.forget_all()
        self._mail.send(Bye(why))
        self._mail.close()
        self.is_there = False
        if self.process is not None:
            self.process.dismiss()

    # --- its requests ------------------------------------------------------------------------------------------------

    def includes(self, request_id: str, name: str) -> bool:
        """Whether the request is one of those that it may follow."""
        if self.only is not None:
            return request_id in self.only or name in self.only
        return self._sharers == 1 or crc32(request_id.encode()) % self._sharers == self._share

    def restrict(self, only: Iterable[str] | None) -> None:
        """To these from now on; None: all."""
        self.only = None if only is None else frozenset(only)
        for request_id, following in list(self.open.items()):
            if not self.includes(request_id, following.name):
                self.forget(request_id)

    def share(self, place: int, sharers: int) -> None:
        """It has the requests of one of so many drafters alike, where it may follow all."""
        if (place, sharers) != (self._share, self._sharers):
            self._share, self._sharers = place, sharers
            self.restrict(self.only)

    def propose(
        self, batch: RequestBatch, texts: list[IntArray], limits: DraftLimits, wanted: IntArray, source: int
    ) -> TreeBatch:
        """Tell the drafter how the requests stand; what of its drafts may be verified next.

        Args:
            texts: [R] tokens of each request.
            wanted: [R] int32: most nodes.
            source: of first choices; the choices beside them count as the next one's.
        """
        handles = self._tell(batch, texts)
        fitting = self._received.fit(handles, texts, wanted, limits.max_depth, limits.is_chain)
        node_start, token_ids, parents, log_q, is_first = fitting
        self.counts.nodes += len(token_ids)
        depth = _core.depths(node_start, parents, batch.size)
        return TreeBatch(batch.request_ids, node_start, token_ids, parents, log_q, source + 1 - is_first, depth)

    def forget(self, request_id: str) -> None:
        """The request is over, or drafted for elsewhere."""
        self._unfit.discard(request_id)
        following = self.open.pop(request_id, None)
        if following is not None:
            self.counts.over += Score(*self._received.close(following.handle))
            self._closed.append(following.handle)

    def forget_all(self) -> None:
        for request_id in list(self.open):
            self.forget(request_id)

    @property
    def score(self) -> Score:
        """How its drafts fared, in requests that run and in those that are over."""
        return sum((Score(*self._received.score(one.handle)) for one in self.open.values()), self.counts.over)

    def new_score(self) -> Score:
        """How its drafts fared in requests that are over since this was asked last."""
        before, self._asked = self._asked, self.counts.over
        return self._asked - before

    def state(self) -> dict[str, Any]:
        """In plain JSON types."""
        process, counts = self.process, self.counts
        return {
            "address": self.address,
            "is_there": self.is_there,
            "error": self.error,
            "window": self.window,
            "fan_out": self.fan_out,
            "request_ids": None if self.only is None else sorted(self.only),
            "process": None if process is None else {"pid": process.pid, "restarts": process.restarts},
            **{name: value for name, value in asdict(counts).items() if name != "over"},
            **asdict(self.score),
            "requests": {
                request_id: {"name": following.name, **asdict(Score(*self._received.score(following.handle)))}
                for request_id, following in self.open.items()
            },
        }

    def _tell(self, batch: RequestBatch, texts: list[IntArray]) -> npt.NDArray[np.int64]:
        """[R] the requests' handles; 0: it does not follow that one, or has just begun to."""
        known = [0 if own is None else own.handle for own in map(self.open.get, batch.request_ids)]
        handles = np.array(known, np.int64)
        index, told, counts, tokens = self._received.tell(handles, texts)
        opened = self._opened(batch, known) if 0 in known else ()
        if not told and not opened and not self._closed:
            return handles
        closed, self._closed = self._closed[:MOST_REQUESTS], self._closed[MOST_REQUESTS:]
        gone = np.array(closed, np.int64).tobytes() if closed else b""
        if not self._mail.send(VerifierUpdate(self.fan_out, opened, gone, told, counts, tokens, self.window)):
            self._lose()
            return np.zeros_like(handles)
        self.counts.verdicts += len(index)
        if self._told_at is None:
            self._told_at = self._clock()
        return handles

    def _opened(self, batch: RequestBatch, handles: list[int]) -> tuple[Opened, ...]:
        """Requests that it is to follow from now on, as many as one message can say."""
        found: list[Opened] = []
        room = _MOST_OPENED
        for view, handle in zip(batch.views, handles, strict=True):
            is_known = handle or view.request_id in self._unfit
            if is_known or not self.includes(view.request_id, view.name):
                continue
            opened = self._open(view) if len(view.token_ids) <= _MOST_OPENED else None
            if opened is None:
                self._unfit.add(view.request_id)
                self.counts.unfit += 1
                if self.counts.unfit == 1:
                    said = (
                        "Spec rollout: a request of %d tokens is not drafted for elsewhere; others like it are not told"
                    )
                    logger.warning(said, len(view.token_ids))
                continue
            room -= len(view.token_ids)
            if room < 0:
                break
            found.append(opened)
            self._received.open(opened.handle, len(view.token_ids))
            self.open[view.request_id] = Following(opened.handle, view.name)
            self._next_handle += 1
            self.counts.opened += 1
        return tuple(found)

    def _open(self, view: RequestView) -> Opened | None:
        """None: no message can say it."""
        tokens = view.token_ids.astype(np.int32, copy=False).tobytes()
        how, most = self._sampling(view.request_id), view.max_new_tokens
        try:
            return _check_opened(
                _pack(Opened(self._next_handle, tokens, view.num_prompt_tokens, how, most, self.window))
            )
        except (msgspec.MsgspecError, OverflowError):
            return None

    # --- what it says ------------------------------------------------------------------------------------------------

    def _put(self, own: DraftUpdate) -> None:
        counts, index = self.counts, (own.handles, own.positions, own.node_start)
        try:
            counts.trees += self._received.put(
                *index, own.token_ids, own.parents, own.ranks, own.log_q, self._vocab_size
            )
        except ValueError as error:
            if not counts.malformed:
                logger.warning("Spec rollout: drafts of `%s` are dropped: %s", self.name, error)
            counts.malformed += 1

    def _note(self, message: DraftUpdate) -> None:
        """What the drafter did."""
        counts, work, now = self.counts, message.work, self._clock()
        counts.drafted += work.drafted
        counts.wasted += work.wasted
        counts.busy_s += work.busy_ms / 1e3
        self._beat += work
        if now - self._beat_at >= _BEAT_S:
            self.beats.append(self._beat)
            self._beat, self._beat_at = Work(), now

    def _greeted(self, hello: Hello) -> None:
        # it has begun anew, or was greeted; what it was told before is closed, if it still knows it, and opened again
        self.forget_all()
        if self.process is not None:
            self.process.is_ready = True
        if hello.version != VERSION:
            self._refuse(f"it speaks version {hello.version} of the protocol, this engine {VERSION}")
        elif hello.vocab_size != self._vocab_size:
            self._refuse(f"its vocabulary has {hello.vocab_size} tokens, the target's {self._vocab_size}")
        else:
            self.model, self.device = hello.model, hello.device
            self.is_there, self.error, self._patience_s = True, "", _FIRST_PATIENCE_S

    def _lose(self) -> None:
        """It is gone, or may be. What it was told of is opened anew once it is back."""
        self.is_there, self._told_at, self._patience_s = False, None, _FIRST_PATIENCE_S
        self.forget_all()

    def _refuse(self, why: str) -> None:
        """It is no drafter for this engine. That is no failure of ours: requests go on without it."""
        self._lose()
        if self.process is not None:
            self.process.dismiss()  # nobody else would use it, and its model is loaded
        if why != self.error:
            logger.warning("Spec rollout: drafter `%s` drafts no more: %s", self.name, why)
        self.error = why
