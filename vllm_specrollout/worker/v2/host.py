"""The host's side of a step on the V2 runner: what was sampled, what to draft next.

On this runner the tokens of a step live on the device, and the next step is scheduled before they are known. So the
scheduler leaves room (placeholders), and drafts are made at the last moment: when the next forward pass is prepared,
the host waits for the tokens of the passes before, the only wait there is, and drafts into the room that was left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_specrollout.step import Speculation
from vllm_specrollout.trees.build import first_nodes, is_chain
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import (
    EMPTY_TREE,
    Decision,
    DraftTree,
    Ending,
    IntArray,
    RequestView,
    Shape,
    Status,
    StepTiming,
)
from vllm_specrollout.verify.rules import accepted_path
from vllm_specrollout.worker.admission import Admission
from vllm_specrollout.worker.endings import external_name
from vllm_specrollout.worker.policy_version import PolicyVersion
from vllm_specrollout.worker.stats import feedback_of

_NO_NODES = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class HostRequest:
    """One request's tokens as far as the host knows them. A request that comes back after preemption is a new one."""

    request_id: str
    admission: Admission
    num_prompt: int
    # [capacity] token ids; the first `length` are known
    buffer: IntArray
    length: int

    @classmethod
    def starting_with(
        cls, request_id: str, admission: Admission, num_prompt: int, tokens: Sequence[int]
    ) -> HostRequest:
        buffer = np.empty(len(tokens) + 256, dtype=np.int32)
        buffer[: len(tokens)] = tokens
        return cls(request_id, admission, num_prompt, buffer, len(tokens))

    def append(self, tokens: IntArray) -> None:
        end = self.length + len(tokens)
        if end > len(self.buffer):
            larger = np.empty(2 * end, dtype=np.int32)
            larger[: self.length] = self.buffer[: self.length]
            self.buffer = larger
        self.buffer[self.length : end] = tokens
        self.length = end

    def view(self, max_model_len: int, limit: int, weights_version: int = 0) -> RequestView:
        generated = self.length - self.num_prompt
        return RequestView(
            self.request_id,
            self.buffer[: self.length],
            self.num_prompt,
            min(self.admission.max_tokens - generated, max_model_len - self.length),
            self.admission.shape,
            min(limit, self.admission.max_draft_tokens),
            self.admission.problem_id,
            weights_version,
            external_name(self.request_id),
        )

    def ending(self, num_tokens: int, status: Status, weights_version: int) -> Ending:
        """What drafters are told at its end: the answer is `num_tokens` long, whatever was sampled behind them."""
        return Ending(
            self.request_id,
            self.admission.problem_id,
            self.buffer[: self.num_prompt].copy(),
            self.buffer[self.num_prompt : min(self.length, self.num_prompt + num_tokens)].copy(),
            status,
            weights_version,
            external_name(self.request_id),
        )


@dataclass(frozen=True, slots=True)
class _Over:
    """A request that has ended, while its last tokens may still be on their way."""

    request: HostRequest
    num_tokens: int
    status: Status


@dataclass(slots=True)
class InFlight:
    """A step whose tokens are on their way to the host."""

    requests: list[HostRequest | None]
    # in batch order; EMPTY_TREE where nothing was drafted
    trees: list[DraftTree]
    # waits for the step's tokens; returns [R, width] sampled tokens and [R] how many of them count
    wait: Callable[[], tuple[IntArray, IntArray]]
    rows: int
    is_decode_only: bool
    # requests that had no place in the batch when the step was scheduled
    waiting: int = 0
    # milliseconds that its drafts took to be made
    ask_ms: float = 0.0


@dataclass(slots=True)
class Settled:
    """Totals of the steps that came home in one wait."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    wait_ms: float = 0.0
    timings: list[StepTiming] = field(default_factory=list)


class Host:
    """Mirrors the running requests and drafts for them."""

    def __init__(
        self, speculation: Speculation, max_model_len: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.speculation = speculation
        self.max_model_len = max_model_len
        self._clock = clock
        self._requests: dict[str, HostRequest] = {}
        self._in_flight: list[InFlight] = []
        self._over: dict[str, _Over] = {}
        self.policy_version = PolicyVersion()
        self._last_home: float | None = None

    def add(self, request: HostRequest) -> None:
        self._requests[request.request_id] = request

    def get(self, request_id: str) -> HostRequest | None:
        return self._requests.get(request_id)

    def forget(self, request_id: str) -> None:
        is_known = self._requests.pop(request_id, None) is not None
        if is_known and request_id not in self._over:
            self.speculation.forget(request_id)

    def end(self, request_id: str, num_tokens: int, status: Status) -> None:
        """The request is over after so many tokens; drafters are told when the last of them has come home."""
        request = self._requests.get(request_id)
        if request is not None:
            self._over[request_id] = _Over(request, num_tokens, status)
            self._tell_endings()

    def unfinished(self) -> list[Ending]:
        """What the engine leaves behind when it is shut down."""
        version = self.policy_version.current()
        over = [over.request.ending(over.num_tokens, over.status, version) for over in self._over.values()]
        running = [r for r in self._requests.values() if r.length > r.num_prompt and r.request_id not in self._over]
        return over + [r.ending(r.length - r.num_prompt, Status.ABORTED, version) for r in running]

    def _tell_endings(self) -> None:
        for request_id, over in list(self._over.items()):
            if self._in_flight and over.request.length < over.request.num_prompt + over.num_tokens:
                continue
            del self._over[request_id]
            self.speculation.finish(over.request.ending(over.num_tokens, over.status, self.policy_version.current()))
            self.speculation.forget(request_id)

    def sent(self, step: InFlight) -> None:
        """A step was launched; nobody waits for it yet."""
        self._in_flight.append(step)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def limits(self) -> list[tuple[str, int]]:
        """Most nodes per request that the request itself allows."""
        return [
            (r.request_id, 0 if r.admission.shape is Shape.OFF else r.admission.max_draft_tokens)
            for r in self._requests.values()
        ]

    def settle(self, keep: int = 0) -> Settled:
        """Wait for the steps in flight but the last `keep`, take their tokens in, and tell policies and drafters."""
        total = Settled()
        end = len(self._in_flight) - keep
        steps, self._in_flight = self._in_flight[:end], self._in_flight[end:]
        homes = []
        for step in steps:
            begin = self._clock()
            homes.append(step.wait())
            total.wait_ms += (self._clock() - begin) * 1e3
        # from the tokens of one wait to those of the next: the device's own pace, the engine's work included
        now = self._clock()
        period_ms = None if self._last_home is None or not steps else (now - self._last_home) * 1e3 / len(steps)
        self._last_home = now if steps else self._last_home
        is_uniform = len({(step.rows, step.is_decode_only) for step in steps}) == 1
        for step, (sampled, counts) in zip(steps, homes, strict=True):
            verified = self._take_in(step, sampled, counts)
            tokens = int(counts.sum())
            timing = _timing(step, period_ms, tokens) if period_ms is not None and is_uniform else None
            if timing is not None:
                total.timings.append(timing)
            with self.speculation.guard.over("learning", "what became of such a step's drafts is not learned from"):
                self.speculation.settle(feedback_of(verified, len(step.requests)), timing)
            total.steps += 1
            total.tokens += tokens
            total.accepted += sum(len(accepted) for _, _, accepted in verified)
        self._tell_endings()
        return total

    def rests(self, batch: int) -> bool:
        """Whether this step is known to go without drafts. Asked once in every step of the engine, with room or not."""
        return self.speculation.rests(batch)

    def draft(self, room: dict[str, int], may_branch: bool, num_ranks: int, is_resting: bool) -> dict[str, DraftTree]:
        """Trees for the next step, at most `room` nodes each; requests without a tree are left out.

        With several tensor-parallel ranks the first one drafts: clocks differ between ranks, and a tree must not. It
        tells the others whatever happens, since they wait for it.

        Args:
            is_resting: what `rests` said of this step.
        """
        trees: dict[str, DraftTree] = {}
        group = get_tp_group() if num_ranks > 1 else None
        if group is None or group.rank_in_group == 0:
            with self.speculation.guard.over("drafting", "requests go on without drafts in such a step"):
                trees = {} if is_resting else self._drafted(room, may_branch)
        return trees if group is None else group.broadcast_object(trees, src=0)

    def _drafted(self, room: dict[str, int], may_branch: bool) -> dict[str, DraftTree]:
        version = self.policy_version.current()
        views = []
        for request_id, limit in room.items():
            request = self._requests.get(request_id)
            if request is not None and request.admission.shape is not Shape.OFF and limit > 0:
                views.append(request.view(self.max_model_len, limit, version))
        if not views:
            return {}
        trees = [_fitted(t, view, may_branch) for t, view in zip(self.speculation.prepare(views), views, strict=True)]
        return {view.request_id: tree for view, tree in zip(views, trees, strict=True) if tree.size}

    def _take_in(self, step: InFlight, sampled: IntArray, counts: IntArray) -> list[tuple[str, DraftTree, IntArray]]:
        verified = []
        for request, tree, tokens, count in zip(step.requests, step.trees, sampled, counts.tolist(), strict=True):
            if request is None or not count:
                continue
            request.append(tokens[:count])
            accepted = accepted_path(tree, tokens[: count - 1]) if tree.size else _NO_NODES
            verified.append((request.request_id, tree, accepted))
        return verified


def _fitted(tree: DraftTree, view: RequestView, may_branch: bool) -> DraftTree:
    """The tree within the request's room, and as a chain where branches cannot be verified."""
    if not tree.size:
        return EMPTY_TREE
    shape = view.shape if may_branch else Shape.CHAIN
    if shape is Shape.CHAIN and not is_chain(tree):
        tree = prune(tree, Decision(tree.size, tree.size, Shape.CHAIN))
    return first_nodes(tree, view.max_draft_tokens)


def _timing(step: InFlight, step_ms: float, tokens: int) -> StepTiming:
    return StepTiming(
        batch=len(step.requests),
        rows=step.rows,
        nodes=sum(tree.size for tree in step.trees),
        # a masked kernel reads the context once however many branches there are
        branches=0,
        tokens=tokens,
        step_ms=step_ms,
        is_decode_only=step.is_decode_only,
        trees=sum(tree.size > 0 for tree in step.trees),
        context=sum(request.length for request in step.requests if request is not None),
        waiting=step.waiting,
        ask_ms=step.ask_ms,
    )
