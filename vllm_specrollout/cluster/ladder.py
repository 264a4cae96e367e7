"""Ladder of a group: which engine runs which request, and which idle engine helps. Pure: a function of what was heard.

`decide` asks only for what is not so already, so it may be called at any time, as often as one likes. It reads what it
is given, and keeps nothing.

An idle engine takes over a part of the fullest engine's requests, where the smaller batches repay the prefill (`move`).
The warm drafter of one that stays idle drafts for the stragglers' own engines (`attach`): `lend` says for which.

Source: SpecActor, sections 4.2 and 4.3. Algorithm 3 (greedy Best-of-N) is `assign`, depth first as the text has it: all
methods for the worst request, then for the next one. As printed it loops over methods first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_specrollout.cluster.dealing import Room, deal

LADDERS = ("off", "move", "attach")


@dataclass(slots=True)
class Copy:
    """A request at one engine."""

    # tokens of its prompt
    prompt: int
    # of its answer, from the first one on
    tokens: int
    # tokens and steps since this copy began
    gained: int = 0
    steps: int = 0
    # that are expected yet; 0: nothing is known
    left: float = 0.0
    # whether its tokens bring back all that it is
    may_move: bool = True

    @property
    def rate(self) -> float:
        """Tokens per step; 0: none is known yet."""
        return self.gained / self.steps if self.steps else 0.0


@dataclass(slots=True)
class GroupEngine:
    """One engine, as last heard of."""

    # of its weights; None: it is down, or loads
    version: int | None = None
    # requests that it runs at once, at most
    places: int = 0
    # request -> its copy here
    running: dict[str, Copy] = field(default_factory=dict)
    # where it runs: a drafter is lent within one host
    host: str = ""
    # its warm drafter's address, empty where none can draft now, and the model there
    drafter: str = ""
    method: str = ""
    # engine that lends its drafter -> requests that it drafts for here
    lent: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """Run this request from the tokens known."""

    engine: str
    request: str
    # that it is taken from; empty: nobody runs it
    source: str = ""


@dataclass(frozen=True, slots=True)
class Attach:
    """Have another engine's drafter draft for these requests here, and no others; none: let go of it."""

    engine: str
    lender: str
    requests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of Algorithm 3: one drafter, and the verifier of its requests."""

    method: str
    # requests it serves
    load: int = 0


class GroupPrices:
    """What steps and prefills cost in this group, as it was measured while batches ran."""

    # of the mean of what was seen, the part that the newest has
    _NEWEST = 0.1
    KEPT = 64
    """Of what was heard of prefills, the last ones."""

    def __init__(self) -> None:
        # requests that run at once -> seconds of a step
        self._steps: dict[int, float] = {}
        # (tokens of prompts, seconds that they took beyond steps without them), as engines told
        self._fills: deque[tuple[int, float]] = deque(maxlen=self.KEPT)

    def stepped(self, batch: int, seconds: float) -> None:
        """A step of `batch` requests took so long."""
        old = self._steps.get(batch, seconds)
        self._steps[batch] = old + self._NEWEST * (seconds - old)

    def filled(self, tokens: int, seconds: float) -> None:
        """So many tokens of prompts were computed, in steps that took so much longer for them."""
        if tokens > 0:
            self._fills.append((tokens, seconds))

    def step_s(self, batch: int) -> float | None:
        """Seconds of a step, on the line between the batches measured beside it; None: there are none on one side."""
        if batch in self._steps:
            return self._steps[batch]
        known = sorted(self._steps)
        at = bisect_left(known, batch)
        if not 0 < at < len(known):
            return None
        low, high = known[at - 1], known[at]
        part = (batch - low) / (high - low)
        return self._steps[low] + part * (self._steps[high] - self._steps[low])

    def prefill_s(self, tokens: int) -> float | None:
        """Seconds of a prefill; None: none was seen. The median of tokens decides: a stall makes none dear."""
        left = sum(count for count, _ in self._fills) / 2
        for count, seconds in sorted(self._fills, key=lambda one: one[1] / one[0]):
            left -= count
            if left <= 0:
                return tokens * seconds / count
        return None


def decide(
    waiting: Sequence[tuple[str, str]],
    engines: Mapping[str, GroupEngine],
    version: int,
    homes: Mapping[str, str],
    prices: GroupPrices,
    forecasts: Mapping[str, float],
    *,
    moves: bool,
) -> list[Run]:
    """Which engine is to run what from now on.

    Args:
        waiting: (request, problem) that nobody runs.
        version: of the group's weights; an engine with others gets nothing.
        homes: problem -> engine that has its siblings, and so their history.
        forecasts: problem -> tokens that its answers are expected to have, where that is known.
        moves: whether idle engines may take over requests.
    """
    able = {name: one for name, one in engines.items() if one.version == version}
    rooms = {name: _room(one) for name, one in able.items()} if waiting else {}
    dealt = [Run(engine, request) for request, engine in deal(waiting, rooms, forecasts, homes).items()]
    if not moves or len(dealt) < len(waiting):
        return dealt
    begun = {one.engine for one in dealt}
    idle = [name for name, one in able.items() if not one.running and name not in begun]
    return [*dealt, *_moves(able, idle, prices)]


def _room(engine: GroupEngine) -> Room:
    """What it can take, and the tokens that it has to generate yet; those with no forecast count as one a request."""
    places = engine.places - len(engine.running)
    return Room(places, sum(one.left or 1.0 for one in engine.running.values()) if places > 0 else 0.0)


def _moves(able: Mapping[str, GroupEngine], idle: Sequence[str], prices: GroupPrices) -> list[Run]:
    """Idle engines take over the half of the fullest ones' requests with the shortest contexts, where that pays."""
    out: list[Run] = []
    sources = sorted((name for name in able if able[name].running), key=lambda name: -len(able[name].running))
    for helper, source in zip(idle, sources, strict=False):
        running = able[source].running
        free = sorted((r for r in running if running[r].may_move), key=lambda r: running[r].prompt + running[r].tokens)
        chosen = free[: min(len(running) // 2, able[helper].places)]
        if chosen and _pays(running, chosen, prices):
            out += [Run(helper, request, source) for request in chosen]
    return out


def _pays(running: Mapping[str, Copy], chosen: Sequence[str], prices: GroupPrices) -> bool:
    """Whether two smaller batches gain more than the prefill of what is moved costs.

    Where nothing is known of lengths, an answer is expected to be as long again: they have a long tail.
    """
    whole, left, moved = (prices.step_s(size) for size in (len(running), len(running) - len(chosen), len(chosen)))
    fill = prices.prefill_s(sum(running[request].prompt + running[request].tokens for request in chosen))
    if whole is None or left is None or moved is None or fill is None:
        return False
    steps = sum((one.left or one.tokens) / max(one.rate, 1.0) for one in running.values()) / len(running)
    return steps * (whole - max(left, moved)) > fill


def lend(engines: Mapping[str, GroupEngine], most: int, busy: Collection[str] = ()) -> list[Attach]:
    """Idle engines lend their drafters to stragglers of their hosts (Algorithm 3), and take them back for work of their
    own. A drafter draws for any number of engines at once.

    Args:
        most: b_max, requests of one drafter, of all engines together; 0: nothing is lent.
        busy: engines that lend nothing, as they get requests now.
    """
    out: list[Attach] = []
    hosts: dict[str, dict[str, GroupEngine]] = {}
    for name, one in engines.items():
        if one.version is not None:
            hosts.setdefault(one.host, {})[name] = one
    for here in hosts.values():
        idle = {name: one for name, one in here.items() if most and not one.running and name not in busy}
        lenders = {name: one.method for name, one in idle.items() if one.drafter}
        owners = {request: name for name, one in here.items() for request in one.running}
        held = {
            (request, lender): name
            for name, one in here.items()
            for lender, requests in one.lent.items()
            if lender in lenders
            for request in requests
            if request in one.running
        }
        load = Counter(lender for _, lender in held)
        workers = {name: Worker(method, load[name]) for name, method in lenders.items()}
        rates = {request: here[name].running[request].rate for request, name in owners.items()}
        served = {(request, lenders[lender]) for request, lender in held}
        pairs = assign(rates, sorted(set(lenders.values())), workers, most=most, running=served)
        wanted: dict[str, dict[str, tuple[str, ...]]] = {}
        for request, lender in [*held, *((request, lender) for (request, _), lender in pairs.items())]:
            own = wanted.setdefault(owners[request], {})
            own[lender] = (*own.get(lender, ()), request)
        out += _changes(here, wanted)
    return out


def assign(
    acceptance: Mapping[str, float],
    methods: Sequence[str],
    workers: Mapping[str, Worker],
    *,
    most: int,
    running: Collection[tuple[str, str]] = (),
) -> Mapping[tuple[str, str], str]:
    """Algorithm 3.

    The request with the lowest acceptance is served first: by each method that it lacks and some worker has, on that
    method's least loaded worker. A method whose workers are full is skipped for this request.

    Args:
        acceptance: active request -> share of its drafted tokens that was accepted, or what goes with it.
        methods: candidates, each once, best first.
        workers: worker -> what it does.
        most: b_max, requests of a worker, 1 or more.
        running: (request, method) pairs that are served already, on whatever worker.

    Returns:
        (request, method) -> the worker that is to serve it. A worker may get no request.
    """
    # method -> (load, order, name) of its workers that have places, the least loaded first
    free: dict[str, list[tuple[int, int, str]]] = {method: [] for method in methods}
    for order, (name, worker) in enumerate(workers.items()):
        if worker.load < most and worker.method in free:
            free[worker.method].append((worker.load, order, name))
    for heap in free.values():
        heapq.heapify(heap)
    pairs: dict[tuple[str, str], str] = {}
    for request in sorted(acceptance, key=acceptance.__getitem__) if any(free.values()) else ():
        for method in (method for method in methods if free[method] and (request, method) not in running):
            load, order, chosen = free[method][0]
            pairs[request, method] = chosen
            if load + 1 < most:
                heapq.heapreplace(free[method], (load + 1, order, chosen))
            else:
                heapq.heappop(free[method])
    return pairs


def _changes(able: Mapping[str, GroupEngine], wanted: Mapping[str, Mapping[str, tuple[str, ...]]]) -> list[Attach]:
    """From what is attached to what is wanted: who lets go comes first."""
    over, new = [], []
    for name, one in able.items():
        own = wanted.get(name, {})
        over += [Attach(name, lender) for lender in one.lent if lender not in own]
        for lender, requests in own.items():
            # those that have ended need not be taken back
            if requests != tuple(request for request in one.lent.get(lender, ()) if request in one.running):
                new.append(Attach(name, lender, requests))
    return over + new
