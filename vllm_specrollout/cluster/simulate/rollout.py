"""One rollout on a cluster, event by event: groups with queues and KV caches, races, and the requests' ends.

An event is the end of a group's step. Groups meet at requests alone: whoever ends one first has ended it for all, and
the other copies leave at the end of their steps. Time is in milliseconds; the same seed gives the same rollout.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.cluster.simulate import racing
from vllm_specrollout.cluster.simulate.group import Counts, Group, Method, Waiting
from vllm_specrollout.cluster.simulate.guesses import Guesses
from vllm_specrollout.cluster.simulate.outcome import Outcome
from vllm_specrollout.cluster.simulate.step_line import StepLine
from vllm_specrollout.cluster.simulate.workload import Floats, Ints, Workload
from vllm_specrollout.decoupled.assignment import rarest
from vllm_specrollout.decoupled.rates import Mode
from vllm_specrollout.errors import ConfigError

# hits [R], trials [R] of a group's requests -> windows [R], whether decoupled [R]
Reconfigure = Callable[[Ints, Ints], tuple[Ints, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """How freed groups join."""

    # requests per group that races, the paper's b_max
    most: int
    # per method: the window of copies that race with it
    windows: tuple[int, ...]
    # to make a model ready on a freed group
    attach_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The cluster and what it does; one verifier's line for all groups."""

    groups: int
    verifier: StepLine
    mode: Mode
    # the first is the one that all requests begin with
    methods: tuple[Method, ...]
    window: int = 1
    waiting: Waiting = Waiting.NEVER
    max_batch: int = 1 << 30
    # tokens that a group's KV cache holds
    kv_tokens: float = math.inf
    # per token whose KV is computed: prompts, and copies' texts
    prefill_ms: float = 0.0
    reconfigure: Reconfigure | None = None
    # tokens per request between two reconfigurations
    reconfigure_every: float = 1000.0
    racing: Racing | None = None


def simulate(work: Workload, setup: Setup, seed: int = 0) -> Outcome:
    """Run one rollout to its last request's end.

    Raises:
        ConfigError: more methods than the workload has acceptances for, or fewer requests than groups.
    """
    if len(setup.methods) > len(work.acceptance):
        cause = f"{len(setup.methods)} methods, and acceptances for {len(work.acceptance)}"
        raise ConfigError(cause, "draw a workload with all methods")
    if setup.racing is not None and len(setup.racing.windows) != len(setup.methods):
        cause = f"{len(setup.racing.windows)} windows of racing copies for {len(setup.methods)} methods"
        raise ConfigError(cause, "give one window per method")
    if setup.racing is not None and setup.mode is Mode.PLAIN:
        # its steps are taken many at once, so nobody could cancel one
        raise ConfigError("groups that decode plainly cannot race", "give no `racing`, or a mode that drafts")
    if not 1 <= setup.groups <= len(work.length):
        raise ConfigError(f"{len(work.length)} requests on {setup.groups} groups", "give each group a request")
    return _Rollout(work, setup, np.random.default_rng(seed)).run()


class _Rollout:
    def __init__(self, work: Workload, setup: Setup, rng: np.random.Generator) -> None:
        self._work, self._setup = work, setup
        total = len(work.length)
        guesses = Guesses(work, len(setup.methods), rng)
        self._groups = [
            Group(number, setup.verifier, setup.mode, work.length, guesses, setup.waiting)
            for number in range(setup.groups)
        ]
        # per group: requests that wait for a place; requests that join a race with the next step
        self._queues = [deque(part.tolist()) for part in np.array_split(np.arange(total), setup.groups)]
        self._joining: list[list[int]] = [[] for _ in self._groups]
        # groups that race -> method; groups with nothing to do
        self._racing: dict[int, int] = {}
        self._free: list[int] = []
        # (request, method) of copies that race, or did
        self._raced: set[tuple[int, int]] = set()
        self._finish_ms: Floats = np.full(total, np.nan)
        # [N] the group that ended each request, -1 before that, and its method then
        self._winner: Ints = np.full(total, -1, dtype=np.int64)
        self._winner_method: Ints = self._winner.copy()
        # [N] how far the copy that is furthest has come; [M, N] draft tokens right, and judged
        self._front: Ints = np.zeros(total, dtype=np.int64)
        self._hits: Ints = np.zeros(work.acceptance.shape, dtype=np.int64)
        self._trials: Ints = np.zeros(work.acceptance.shape, dtype=np.int64)
        self._left, self._tokens = total, 0
        self._events: list[tuple[float, int]] = []
        self._now = 0.0
        self._busy_ms: Floats = np.zeros(setup.groups)
        self._races = self._cancelled = self._preempted = 0

    def run(self) -> Outcome:
        for group in self._groups:
            self._start(group)
        while self._left:
            self._now, number = heapq.heappop(self._events)
            self._end(self._groups[number])
            self._start(self._groups[number])
        return self._outcome()

    def _start(self, group: Group) -> None:
        """The group's next step, or a race, or nothing."""
        copies = group.copies
        is_over = self._winner[copies.ids] >= 0
        if is_over.any():
            self._cancelled += int((self._winner[copies.ids[is_over]] != group.number).sum())
            copies.keep(~is_over)
        computed = self._admit(group) + self._join(group)
        self._reconfigure(group)
        if not copies.size:
            self._release(group)
            return
        ms = computed * self._setup.prefill_ms + group.begin(self._setup.methods[group.method])
        self._busy_ms[group.number] += ms
        heapq.heappush(self._events, (self._now + ms, group.number))

    def _end(self, group: Group) -> None:
        """A step is over: note what it yielded, and who ended."""
        copies = group.copies
        if not copies.size:
            return  # it has waited for its model
        group.end()
        if group.mode is not Mode.PLAIN:
            self._hits[group.method, copies.ids] += group.hits
            self._trials[group.method, copies.ids] += group.trials
        before = self._front[copies.ids]
        self._front[copies.ids] = np.maximum(before, copies.position)
        self._tokens += int((self._front[copies.ids] - before).sum())
        ended = copies.ids[copies.position >= self._work.length[copies.ids]]
        first = ended[self._winner[ended] < 0]
        self._finish_ms[first] = self._now
        self._winner[first], self._winner_method[first] = group.number, group.method
        self._left -= len(first)
        if len(ended):
            copies.keep(copies.position < self._work.length[copies.ids])
            self._cancelled += len(ended) - len(first)
        self._preempt(group)

    def _admit(self, group: Group) -> int:
        """Requests from the queue, as far as there is room; returns the tokens to compute first."""
        queue, setup, copies = self._queues[group.number], self._setup, group.copies
        used = self._used(group)
        ids: list[int] = []
        while queue and copies.size + len(ids) < setup.max_batch:
            if self._winner[queue[0]] >= 0:
                queue.popleft()  # it went back to the queue, and a copy elsewhere ended it meanwhile
                continue
            needed = self._work.prompt + int(self._front[queue[0]]) + 1
            if used + needed > setup.kv_tokens and copies.size + len(ids) > 0:
                break
            ids.append(queue.popleft())
            used += needed
        return self._add(group, ids, setup.window)

    def _join(self, group: Group) -> int:
        """Copies of requests that still run somewhere else."""
        joining = self._joining[group.number]
        ids = [request for request in joining if self._winner[request] < 0]
        joining.clear()
        windows = self._setup.racing.windows if self._setup.racing else ()
        return self._add(group, ids, windows[group.method]) if ids else 0

    def _add(self, group: Group, ids: list[int], window: int) -> int:
        if not ids:
            return 0
        new = np.asarray(ids, dtype=np.int64)
        position = self._front[new]
        group.copies.add(new, position, window, group.mode is Mode.DECOUPLED)
        return int(position.sum()) + self._work.prompt * len(ids)

    def _used(self, group: Group) -> int:
        """Tokens in the group's KV cache."""
        return int(group.copies.position.sum()) + self._work.prompt * group.copies.size

    def _preempt(self, group: Group) -> None:
        """The newest go back to the queue while the KV cache is too full; a copy that races just leaves."""
        copies = group.copies
        if math.isinf(self._setup.kv_tokens):
            return
        while copies.size > 1 and self._used(group) + copies.size > self._setup.kv_tokens:
            request = int(copies.ids[-1])
            copies.keep(np.arange(copies.size) < copies.size - 1)
            if group.number not in self._racing:
                self._queues[group.number].appendleft(request)
                self._preempted += 1

    def _reconfigure(self, group: Group) -> None:
        setup, copies = self._setup, group.copies
        if setup.reconfigure is None or group.since < setup.reconfigure_every or not copies.size:
            return
        group.since = 0.0
        hits, trials = self._hits[group.method, copies.ids], self._trials[group.method, copies.ids]
        copies.reconfigure(*setup.reconfigure(hits, trials))

    def _release(self, group: Group) -> None:
        """A group without requests may race for those of others."""
        self._free.append(group.number)
        if self._setup.racing is None or not self._left:
            return
        for number in self._free:
            self._racing.pop(number, None)
        for number in self._free:
            groups_of = {method: self._groups_with(method) for method in range(len(self._setup.methods))}
            self._racing[number] = rarest(range(len(self._setup.methods)), groups_of)
        self._race(self._setup.racing)

    def _groups_with(self, method: int) -> int:
        own = sum(1 for group in self._groups if group.number not in self._racing and group.copies.size and not method)
        return own + sum(1 for raced in self._racing.values() if raced == method)

    def _race(self, plan: Racing) -> None:
        active = np.flatnonzero(self._winner < 0)
        rates = self._hits[0, active] / np.maximum(self._trials[0, active], 1)
        # of thousands, those with the lowest acceptance are enough
        enough = plan.most * len(self._racing) + len(self._raced)
        lowest = np.argsort(rates, kind="stable")[:enough]
        loads = {number: self._groups[number].copies.size + len(self._joining[number]) for number in self._racing}
        slowest = dict(zip(active[lowest].tolist(), rates[lowest].tolist(), strict=True))
        found = racing.assign(slowest, self._racing, loads, self._raced, plan.most)
        for race in found:
            self._joining[race.group].append(race.request)
            self._raced.add((race.request, race.method))
        self._races += len(found)
        for number in [number for number in self._free if self._joining[number]]:
            self._free.remove(number)
            self._groups[number].method = self._racing[number]
            # the model has to be there before its first step
            heapq.heappush(self._events, (self._now + plan.attach_ms, number))

    def _outcome(self) -> Outcome:
        for end_ms, number in self._events:
            if self._groups[number].copies.size:
                self._busy_ms[number] -= end_ms - self._now  # a step that nobody waits for any more
        counts = Counts()
        for group in self._groups:
            counts.add(group.counts)
        return Outcome(
            finish_ms=self._finish_ms,
            winner=self._winner,
            winner_method=self._winner_method,
            busy_ms=self._busy_ms,
            tokens=self._tokens,
            counts=counts,
            races=self._races,
            races_won=int((self._winner != self._homes()).sum()),
            cancelled=self._cancelled,
            preempted=self._preempted,
        )

    def _homes(self) -> Ints:
        """[N] the group whose queue each request began in."""
        return np.repeat(
            np.arange(len(self._groups)), [len(part) for part in np.array_split(self._winner, len(self._groups))]
        )
