"""Record of a batch for the driver: which worker runs which request, and what has come of it. Pure.

A request may run at several workers at once. Each copy's tokens are kept apart, so an answer is always one worker's.
The first copy to end is the answer. All copies end with the same tokens; where rounding ever made two differ, that is
counted, and the answer is still one that the target gave.

Messages may be lost. So workers are called now and then, and name what they run. Each side hears the other in order: a
request that was given before a call, and that its answer does not name, is not there, and no word of it is on its way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout.cluster.group.messages import Call, Cancel, Here, Message, Piece, Progress, Run, Want
from vllm_specrollout.errors import SpecRolloutError

# what of `SamplingParams` keeps state that tokens do not bring back: such a request is begun anew elsewhere
_KEEPS_STATE = ("stop", "structured_outputs", "thinking_token_budget", "watermarking", "trace_decode_token_ids")
MOST_RUNS = 5
"""Times that a request is lost, with its worker or on its way; then the request may be why."""


class GroupError(SpecRolloutError):
    """A batch cannot be completed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a batch."""

    request: str
    # [P] token ids
    prompt: tuple[int, ...]
    # arguments of `SamplingParams`, with a seed if it samples
    params: Mapping[str, Any]

    @property
    def is_resumable(self) -> bool:
        return not any(self.params.get(name) for name in _KEEPS_STATE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to."""

    # [n] token ids
    token_ids: tuple[int, ...]
    # [n] of these tokens, natural logarithm; empty where `logprobs` was not 0
    logprobs: tuple[float, ...]
    # vLLM's: `stop` or `length`
    finish_reason: str
    # the stop token or string; empty: the end of the text, or of the length
    stop_reason: str
    # the worker that ended it first
    worker: str
    # workers that it ran at by then
    copies: int


@dataclass(slots=True)
class _Copy:
    """A request at one worker: its tokens from the first one on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # number of the last call before it was given, or cancelled for its gap
    since: int = 0
    # some of its tokens were lost on their way, so that what comes behind them is of no use
    has_gap: bool = False


@dataclass(slots=True)
class _State:
    """A request that has no answer yet."""

    ask: Ask
    copies: dict[str, _Copy] = field(default_factory=dict)
    # the longest that a worker which is gone has told
    known: _Copy = field(default_factory=_Copy)
    runs: int = 0

    def best(self) -> _Copy:
        """The longest that is known of it."""
        return max([self.known, *self.copies.values()], key=lambda copy: len(copy.tokens))


class Dealer:
    """A batch of requests, dealt out to workers as they have room.

    Args:
        asks: in the order that they are dealt in.
        called: number of the last call that workers had.
    """

    def __init__(self, asks: Sequence[Ask], called: int = 0) -> None:
        self._called = called
        self._open = {ask.request: _State(ask) for ask in asks}
        self._queue = deque(self._open)
        # worker -> requests it may run
        self._places: dict[str, int] = {}
        # worker -> requests of `_open` that it runs
        self._load: Counter[str] = Counter()
        self._out: list[tuple[str, Message]] = []
        # copies of requests that have an answer
        self._left: dict[str, set[str]] = {}
        self.answers: dict[str, Answer] = {}
        self.resubmitted = 0
        """Requests that were given to a worker again, because theirs was gone or knew nothing of them."""
        self.disagreements = 0
        """Copies that differed from the answer, which rounding alone can do."""

    @property
    def is_done(self) -> bool:
        return not self._open

    @property
    def waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._queue)

    def call(self, has_drafter: Mapping[str, bool], number: int) -> None:
        """Ask workers what they run.

        Args:
            has_drafter: worker -> whether the drafter on its cores can draft.
            number: above that of all calls before.
        """
        self._called = number
        self._out += [(worker, Call(number, can_draft)) for worker, can_draft in has_drafter.items()]

    def take(self, worker: str, message: Message) -> None:
        """What a worker says.

        Raises:
            GroupError: it refused a request, or one was lost too often.
        """
        match message:
            case Here():
                self._places[worker] = message.places
                self._compare(worker, message)
            case Want():
                self._copy(worker, message.request)
            case Progress():
                for piece in message.pieces:
                    self._add(worker, piece)

    def lose(self, worker: str) -> None:
        """A worker is gone: what nobody else runs goes to the head of the queue, with what is known of it.

        Raises:
            GroupError: a request has lost too many workers.
        """
        self._places.pop(worker, None)
        for names in self._left.values():
            names.discard(worker)
        for request, state in reversed(self._open.items()):
            if worker in state.copies:
                self._lost(worker, request)
        del self._load[worker]

    def due(self) -> list[tuple[str, Message]]:
        """(worker, message) of all that is to be said now."""
        while self._queue and self._places:
            # the emptiest one first
            worker = min(self._places, key=lambda name: self._load[name] / max(self._places[name], 1))
            if self._load[worker] >= self._places[worker]:
                break
            self._begin(worker, self._queue.popleft(), is_copy=False)
        out, self._out = self._out, []
        return out

    def leave(self) -> list[tuple[str, Message]]:
        """The batch is over, or given up: what runs of it is of no use."""
        at = {request: set(state.copies) for request, state in self._open.items()}
        return [
            (worker, Cancel(request)) for own in (self._left, at) for request, names in own.items() for worker in names
        ]

    def _begin(self, worker: str, request: str, *, is_copy: bool) -> None:
        state = self._open[request]
        best = state.best() if state.ask.is_resumable else _Copy()
        state.copies[worker] = _Copy(list(best.tokens), list(best.logprobs), self._called)
        state.runs += not is_copy
        self._load[worker] += 1
        self._out.append((worker, Run(request, state.ask.prompt, state.ask.params, tuple(best.tokens), is_copy)))

    def _compare(self, worker: str, here: Here) -> None:
        """What a worker runs, with what it was given."""
        running = set(here.running)
        for request, state in reversed(self._open.items()):
            copy = state.copies.get(worker)
            if copy is not None and copy.since < here.number and request not in running:
                self._lost(worker, request)
        for request in here.running:
            own = self._open.get(request)
            copy = None if own is None else own.copies.get(worker)
            if copy is None or copy.has_gap:
                self._out.append((worker, Cancel(request)))

    def _lost(self, worker: str, request: str) -> None:
        """A worker does not run this request any more, and has not answered it."""
        state = self._open[request]
        copy = state.copies.pop(worker)
        self._load[worker] -= 1
        if len(copy.tokens) > len(state.known.tokens):
            state.known = copy
        if state.copies:
            return
        if state.runs >= MOST_RUNS:
            raise GroupError(
                f"request {request} was lost {state.runs} times, with the worker that ran it or on its way there",
                "look at the workers' own messages: the request may be what ends them, or what they cannot read",
            )
        self._queue.appendleft(request)
        self.resubmitted += 1

    def _copy(self, worker: str, request: str) -> None:
        """A worker would race for this request; not while others have no worker at all."""
        state = self._open.get(request)
        if state is None or worker not in self._places or worker in state.copies or self._queue:
            return
        self._begin(worker, request, is_copy=True)

    def _add(self, worker: str, piece: Piece) -> None:
        state = self._open.get(piece.request)
        if state is None:
            # a copy that has ended is no longer there to cancel
            if piece.finish:
                self._left.get(piece.request, set()).discard(worker)
            return
        copy = state.copies.get(worker)
        if copy is None or copy.has_gap or piece.start < len(copy.tokens):
            return  # of a run that is over: it was lost, and has come back
        if piece.start > len(copy.tokens):
            # given again once it is known to have ended there
            copy.has_gap, copy.since = True, self._called
            self._out.append((worker, Cancel(piece.request)))
            return
        copy.tokens += piece.tokens
        copy.logprobs += piece.logprobs
        if piece.finish == "error":
            raise GroupError(f"worker {worker} refused request {piece.request}: {piece.reason}", "change the request")
        if piece.finish:
            self._answer(worker, piece, state, copy)

    def _answer(self, worker: str, piece: Piece, state: _State, copy: _Copy) -> None:
        others = [one for name, one in state.copies.items() if name != worker]
        self.disagreements += sum(one.tokens != copy.tokens[: len(one.tokens)] for one in others)
        self.answers[piece.request] = Answer(
            tuple(copy.tokens), tuple(copy.logprobs), piece.finish, piece.reason, worker, len(state.copies)
        )
        del self._open[piece.request]
        self._load.subtract(list(state.copies))
        self._left[piece.request] = set(state.copies) - {worker}
        # said here, and by nobody else: a worker that says it has ended a request may die before the driver hears so
        self._out += [(name, Cancel(piece.request)) for name in state.copies if name != worker]
