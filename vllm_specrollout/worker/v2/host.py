"""The host's side of a step on the V2 runner: what was sampled, and who may be drafted for.

On this runner the tokens of a step live on the device, and the next step is scheduled before they are known. The host
takes steps in when their tokens are home, a step or two later, and waits for none of them while requests run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.trees.batch import with_branches
from vllm_specrollout.types import (
    MOST_NODES,
    Answer,
    DraftMode,
    FinishReason,
    IntArray,
    RequestBatch,
    RequestView,
    StepTiming,
    TreeBatch,
    VerifyResult,
)
from vllm_specrollout.worker.drafting import Drafting
from vllm_specrollout.worker.request import Admission, RequestState


@dataclass(slots=True, eq=False)
class InFlight:
    """A step whose tokens are on their way to the host."""

    requests: list[HostRequest | None]
    # over the requests, in batch order; none until the step is home
    trees: TreeBatch
    # the engine step
    number: int
    # waits for the step's tokens; returns [R, width] sampled tokens and [R] how many of them count
    wait: Callable[[], tuple[IntArray, IntArray]]
    rows: int
    is_decode_only: bool
    # requests that had no place in the batch when the step was scheduled
    waiting: int = 0
    # the request whose verdict was withheld, if its draft was met; empty: nobody's
    withheld: str = ""
    # that it computed with
    weights_version: int = 0
    # the trees, asked once the tokens are home; None: nothing was drafted
    drafted: Callable[[], TreeBatch] | None = None
    # what would be verified of them; None: nothing was drafted
    planned: PlannedStep | None = None
    # whether the tokens are there, so that nobody need wait
    is_home: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class Settled:
    """Totals of the steps that came home in one wait."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    # steps with drafts, and those of them in which some branch
    drafting: int = 0
    branching: int = 0


def tokens_of(output: Any, event: torch.cuda.Event) -> Callable[[], tuple[IntArray, IntArray]]:
    """What `InFlight.wait` is, for vLLM's output of a step whose tokens are copied when `event` is."""

    def wait() -> tuple[IntArray, IntArray]:
        event.synchronize()
        return output.sampled_token_ids, output.num_sampled_tokens_np

    return wait


def timing_of(step: InFlight, step_ms: float, tokens: int) -> StepTiming:
    """What a step cost that took so long from the tokens before it to its own."""
    return StepTiming(
        batch=len(step.requests),
        rows=step.rows,
        nodes=step.trees.num_nodes,
        # a masked kernel reads the context once however many branches there are
        branches=0,
        tokens=tokens,
        step_ms=step_ms,
        is_decode_only=step.is_decode_only,
        trees=int(np.count_nonzero(step.trees.sizes)),
        context=sum(request.length for request in step.requests if request is not None),
        waiting=step.waiting,
    )


class HostRequest(RequestState):
    """One request's tokens as far as the host knows them. A request that comes back after preemption is a new one."""

    __slots__ = ("admission", "begins_at", "buffer", "is_told", "length", "num_prompt", "request_id", "temperature")

    def __init__(
        self,
        request_id: str,
        admission: Admission,
        num_prompt: int,
        tokens: Sequence[int],
        temperature: float = 1.0,
        is_resumed: bool = False,
    ) -> None:
        self.request_id = request_id
        self.temperature = temperature
        self.admission = admission
        self.num_prompt = num_prompt
        # tokens before its first one here
        self.begins_at = len(tokens) if is_resumed else num_prompt
        # [capacity] int32 token ids; the first `length` are known
        self.buffer: IntArray = np.empty(len(tokens) + 256, dtype=np.int32)
        self.buffer[: len(tokens)] = tokens
        self.length = len(tokens)
        # whether its end was told
        self.is_told = False
        super().__init__(request_id, admission, self.buffer[: self.length], num_prompt)

    def close(self) -> None:
        """Its end is told."""
        self.is_told = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def append(self, tokens: IntArray) -> None:
        end = self.length + len(tokens)
        if end > len(self.buffer):
            larger = np.empty(2 * end, dtype=np.int32)
            larger[: self.length] = self.buffer[: self.length]
            self.buffer = larger
        self.buffer[self.length : end] = tokens
        self.length = end

    def ended(self, num_tokens: int, status: FinishReason, weights_version: int) -> Answer:
        """What drafters are told at its end: the answer is `num_tokens` long, whatever was sampled behind them."""
        end = min(self.length, self.num_prompt + num_tokens)
        return self.ending(self.buffer[: self.num_prompt], self.buffer[self.num_prompt : end], status, weights_version)


@dataclass(slots=True)
class StepState:
    """The step in progress: made when it begins, dropped with it."""

    number: int = 0
    num_running: int = 0
    # requests without a place in the batch, and those that have just lost theirs
    waiting: int = 0
    preempted: AbstractSet[str] = frozenset()
    has_drafts: bool = False
    # most drafts of the requests that some room was left for
    room: Mapping[str, int] = field(default_factory=dict)
    # the request that is held at the first token of its path; empty: none is
    withheld: str = ""
    num_rows: int = 0
    # as in `InFlight`
    drafted: Callable[[], TreeBatch] | None = None
    # drafts that are on their way home with the step's tokens; None: none are
    home: Any = None
    # [R] logits rows of each request
    num_logits: IntArray | None = None
    # requests whose hidden states are wanted; None: others run
    wanted: Any = None
    # first rows, paths and counts of what was accepted, until the KV cache is put in order by it
    accepted: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Over:
    """A request that has ended, while its last tokens may still be on their way."""

    request: HostRequest
    num_tokens: int
    status: FinishReason
    weights_version: int


class Host:
    """Mirrors the running requests and drafts for them."""

    def __init__(
        self, drafting: Drafting, max_model_len: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafting = drafting
        self.speculator = drafting.speculator
        self.max_model_len = max_model_len
        self.clock = clock
        self._requests: dict[str, HostRequest] = {}
        self.limits: dict[str, int] = {}
        """Most nodes of running requests that allow only so many."""
        # preempted: they come back as new ones, or end
        self._away: dict[str, HostRequest] = {}
        self._in_flight: list[InFlight] = []
        self._over: dict[str, _Over] = {}
        self.weights_version = drafting.weights_version
        self._last_home: float | None = None
        # steps that came home, the milliseconds that each took (None: not known), and its tokens
        self._untimed: list[tuple[InFlight, float | None, int]] = []
        self.came_home: Callable[[InFlight, VerifyResult], None] = lambda step, result: None
        """Told of each step that was taken in, and what of its trees was accepted."""
        self.plan: Callable[[InFlight], PlannedStep | None] = lambda step: None
        """Asked what would be verified of a step's drafts, which are home, before its tokens are taken in."""
        # got their first token in the step that is taken in
        self._begun: list[HostRequest] = []

    def add(self, request: HostRequest) -> None:
        self._away.pop(request.request_id, None)
        self._requests[request.request_id] = request
        limit = request.admission.max_draft_tokens
        if request.admission.shape is not DraftMode.OFF:
            self.drafting.admit(request.view)
        else:
            limit = 0
        if limit < MOST_NODES:
            self.limits[request.request_id] = limit

    def get(self, request_id: str) -> HostRequest | None:
        return self._requests.get(request_id)

    def leave(self, request_id: str, is_preempted: bool = False) -> None:
        """It loses its place: it is over, or it was preempted."""
        request = self._requests.pop(request_id, None)
        self.limits.pop(request_id, None)
        if request is not None and request_id not in self._over:
            self.drafting.forget(request_id)
        if not is_preempted:
            self._away.pop(request_id, None)
        elif request is not None:
            self._away[request_id] = request

    def end(self, request_id: str, num_tokens: int, status: FinishReason) -> None:
        """The request is over after so many tokens; drafters are told when the last of them has come home."""
        request = self._requests.get(request_id) or self._away.get(request_id)
        if request is not None:
            self._over[request_id] = _Over(request, num_tokens, status, self.weights_version.computed)
            self._tell_endings()

    def unfinished(self) -> list[Answer]:
        """What the engine leaves behind when it is shut down."""
        version = self.weights_version.computed
        over = [over.request.ended(over.num_tokens, over.status, over.weights_version) for over in self._over.values()]
        known = [*self._requests.values(), *self._away.values()]
        running = [r for r in known if r.length > r.num_prompt and r.request_id not in self._over]
        return over + [r.ended(r.length - r.num_prompt, FinishReason.ABORTED, version) for r in running]

    def standing(self) -> dict[str, tuple[int, int]]:
        """Request that runs, or was preempted -> tokens of its prompt, and of its answer so far."""
        known = {**self._requests, **self._away}
        return {name: (r.num_prompt, r.length - r.num_prompt) for name, r in known.items() if name not in self._over}

    def _tell_endings(self) -> None:
        for request_id, over in list(self._over.items()):
            if self._in_flight and over.request.length < over.request.num_prompt + over.num_tokens:
                continue
            del self._over[request_id]
            over.request.close()
            self.speculator.finish(over.request.ended(over.num_tokens, over.status, over.weights_version))
            self.drafting.forget(request_id)

    def _may_begin(self, request: HostRequest) -> bool:
        """Not once its end was told, though steps that compute it, also from before a preemption, come home later."""
        name = request.request_id
        now = self._requests.get(name) or self._away.get(name)
        return name in self._over or (now is not None and not now.is_told)

    def sent(self, step: InFlight) -> None:
        """A step was launched; nobody waits for it yet."""
        self._in_flight.append(step)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_out(self) -> int:
        """Steps in flight from the first one on whose tokens are not home yet."""
        home = sum(1 for _ in itertools.takewhile(lambda step: step.is_home(), self._in_flight))
        return len(self._in_flight) - home

    @property
    def rows_in_flight(self) -> int:
        return sum(step.rows for step in self._in_flight)

    def settle(self, keep: int = 0) -> Settled:
        """Wait for the steps in flight but the last `keep` and take their tokens in; `learn` follows."""
        total = Settled()
        end = len(self._in_flight) - keep
        steps, self._in_flight = self._in_flight[:end], self._in_flight[end:]
        homes = []
        for step in steps:
            homes.append(step.wait())
        # from the tokens of one wait to those of the next: the device's own pace, the engine's work included
        now = self.clock()
        period_ms = None if self._last_home is None or not steps else (now - self._last_home) * 1e3 / len(steps)
        if steps:
            self._last_home = now
        is_uniform = len({(step.rows, step.is_decode_only) for step in steps}) == 1
        for step, (sampled, counts) in zip(steps, homes, strict=True):
            if step.drafted is not None:
                step.trees = step.drafted()
                step.planned = self.plan(step)
            num_accepted, accepted = self._take_in(step, sampled, counts)
            tokens = int(counts.sum())
            self.drafting.observe(step.planned, step.trees, num_accepted, accepted)
            self._untimed.append((step, period_ms if is_uniform else None, tokens))
            self.came_home(step, VerifyResult(num_accepted, accepted))
            version = self.weights_version.number
            for request in filter(self._may_begin, self._begun):
                self.drafting.begin(request.seen(request.buffer[: request.length], self.max_model_len, version))
            self._begun.clear()
            total.steps += 1
            total.tokens += tokens
            total.accepted += len(accepted)
            total.drafted += step.trees.num_nodes
            total.drafting += step.trees.num_nodes > 0
            total.branching += bool(with_branches(step.trees).any())
        self._tell_endings()
        return total

    def learn(self) -> list[StepTiming]:
        """Tell policies what the steps cost that came home, where that is known, and return it.

        A device may wait for what comes between `settle` and the next launch, so this comes behind it.
        """
        steps, self._untimed = self._untimed, []
        found = []
        for step, period_ms, tokens in steps:
            timing = None if period_ms is None else timing_of(step, period_ms, tokens)
            self.drafting.timed(timing)
            if timing is not None:
                found.append(timing)
        return found

    def batch(self, room: Mapping[str, int], may_branch: bool) -> RequestBatch:
        """Views of those requests that may be drafted for, as far as their tokens are known: from the first one on.

        Before that a request has not begun, and whoever watches is told of no end if it never does.

        Args:
            room: most nodes of each.
        """
        version = self.weights_version.number
        views: list[RequestView] = []
        for request_id, limit in room.items():
            request = self._requests.get(request_id)
            if request is None or request.length == request.begins_at:
                continue
            if request.admission.shape is not DraftMode.OFF and limit > 0:
                views.append(request.seen(request.buffer[: request.length], self.max_model_len, version, limit))
        return RequestBatch.of(views, may_branch=may_branch)

    def _take_in(self, step: InFlight, sampled: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Append what was sampled; returns the accepted nodes, as in `VerifyResult`."""
        if step.withheld or self.drafting.withheld.held:
            self._compare(step, sampled, counts)
        for request, tokens, count in zip(step.requests, sampled, counts.tolist(), strict=True):
            if request is not None and count:
                if request.length == request.begins_at and request.admission.shape is not DraftMode.OFF:
                    self._begun.append(request)
                request.append(tokens[:count])
        return self.drafting.followed(step.trees, sampled, counts)

    def _compare(self, step: InFlight, sampled: IntArray, counts: IntArray) -> None:
        """Tokens decoded plainly meet those that were withheld before; and what this step withheld is remembered."""
        withheld, version = self.drafting.withheld, self.weights_version.number
        for request, tokens, count in zip(step.requests, sampled, counts.tolist(), strict=True):
            name = "" if request is None else request.request_id
            if request is None or not count or self._requests.get(name) is not request:
                continue
            if name in withheld.held:
                withheld.compare(name, tokens[:count].tolist(), request.length, version)
            elif name == step.withheld and count == 1 and (rest := tokens[1:][tokens[1:] >= 0].tolist()):
                has_branches = bool(with_branches(step.trees).any())
                withheld.hold(name, rest, request.length + 1, step.weights_version, has_branches=has_branches)
