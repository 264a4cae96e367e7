"""One rollout on a cluster, event by event: groups, races, and the requests' ends.

Source: SpecActor, sections 4.1 and 4.2. An event is the end of a group's step. Groups meet at requests alone: whoever
ends one first has ended it for all, and the other copies leave at the end of their steps. Time is in milliseconds; the
same seed gives the same rollout.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from vllm_specrollout.bench.studies.formulas import Floats, Ints, StepLine, best_window
from vllm_specrollout.bench.studies.group import Group, Guesses, Mode, Workload

from vllm_specrollout.cluster.ladder import Worker, assign
from vllm_specrollout.cluster.rates import decoupled_rate
from vllm_specrollout.errors import ConfigError


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
    mode: Mode
    verifier: StepLine
    # a line per method of drafting; the first is the one that all requests begin with
    drafters: tuple[StepLine, ...]
    window: int = 1
    # per token of a copy's text, whose KV is computed again
    prefill_ms: float = 0.0
    # hits [R], trials [R] of a group's requests -> windows [R]
    reconfigure: Callable[[Ints, Ints], Ints] | None = None
    # tokens per request between two reconfigurations
    reconfigure_every: float = 1000.0
    racing: Racing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a rollout."""

    # [N] ms since the start at which each request ended
    finish_ms: Floats
    # [N] group whose copy ended first, int
    winner: Ints
    # [G] ms in which each group's verifier or drafter worked
    busy_ms: Floats
    # of all groups together
    counts: Counter[str]
    # copies that joined a race, and those of them that won
    races: int
    races_won: int

    @property
    def makespan_ms(self) -> float:
        return float(self.finish_ms.max())

    @property
    def idle_share(self) -> float:
        """Of the groups' time, the part in which they had nothing to do."""
        return 1.0 - float(self.busy_ms.sum()) / (len(self.busy_ms) * self.makespan_ms)

    def running_curve(self, points: int = 200) -> tuple[Floats, Ints]:
        """Times in ms, and how many requests have not ended by then."""
        times = np.linspace(0.0, self.makespan_ms, points)
        return times, len(self.finish_ms) - np.searchsorted(np.sort(self.finish_ms), times, side="right")


class Reconfiguration:
    """Algorithm 2 at the present batch: one window for the group, own ones for requests well below its average.

    The group's own window is planned anew as well, since a simulated batch shrinks from hundreds of requests to one. A
    request that is below gets the window that would be best if all matched as it does. All stay decoupled.
    """

    def __init__(self, verifier: StepLine, drafter: StepLine) -> None:
        self._verifier, self._drafter = verifier, drafter

    def __call__(self, hits: Ints, trials: Ints) -> Ints:
        """Args: [R] draft tokens found right, and judged. Returns: [R] windows."""
        average = (float(hits.sum()) + 1.0) / (float(trials.sum()) + 2.0)
        windows = np.full(len(hits), self._best(average, len(hits)), dtype=np.int64)
        # 20 levels of acceptance are enough for windows, and save the search for each request
        levels = np.round((hits + 1.0) / (trials + 2.0) * 20.0)
        low = surely_below(trials, hits)
        for level in np.unique(levels[low]):
            windows[low & (levels == level)] = self._best(float(level) / 20.0, len(hits))
        return windows

    def _best(self, p: float, batch: int) -> int:
        return best_window(decoupled_rate, min(p, 0.999), batch, self._verifier, self._drafter)


def surely_below(tried: Ints, matched: Ints) -> NDArray[np.bool_]:
    """[R] whether a request matches less than all together by more than chance.

    m matches of n trials are fewer than p n by more than two standard errors of a binomial count, less the usual half
    for whole numbers: p n - m - 1/2 > 2 sqrt(n p (1 - p)). By chance alone half of all requests are below the average,
    and about one in 44 is so far below.

    Args:
        tried, matched: [R] drafted tokens, and how many of them the target sampled itself.
    """
    mean = int(matched.sum()) / max(int(tried.sum()), 1)
    below: NDArray[np.bool_] = mean * tried - matched - 0.5 > 2.0 * np.sqrt(tried * (mean * (1.0 - mean)))
    return below


def simulate(work: Workload, setup: Setup, seed: int = 0) -> Outcome:
    """Run one rollout to its last request's end.

    Raises:
        ConfigError: fewer requests than groups.
    """
    if not 1 <= setup.groups <= len(work.length):
        raise ConfigError(f"{len(work.length)} requests on {setup.groups} groups", "give each group a request")
    return _Rollout(work, setup, np.random.default_rng(seed)).run()


class _Rollout:
    def __init__(self, work: Workload, setup: Setup, rng: np.random.Generator) -> None:
        self._work, self._setup = work, setup
        total, guesses = len(work.length), Guesses(work, rng)
        self._groups = [
            Group(number, setup.mode, setup.verifier, setup.drafters, work.length, guesses)
            for number in range(setup.groups)
        ]
        # per group: requests that it runs from its next step on, at first those that begin there
        parts = np.array_split(np.arange(total), setup.groups)
        self._joining = [part.tolist() for part in parts]
        # [N] the group that each request began in, int
        self._home: Ints = np.repeat(np.arange(setup.groups), [len(part) for part in parts])
        # groups that race -> method; groups with nothing to do
        self._racing: dict[int, int] = {}
        self._free: list[int] = []
        # (request, method) of copies that race, or did
        self._raced: set[tuple[int, int]] = set()
        self._finish_ms: Floats = np.full(total, np.nan)
        # [N] the group that ended each request, -1 before that, int
        self._winner: Ints = np.full(total, -1, dtype=np.int64)
        # [N] how far the copy that is furthest has come; [M, N] draft tokens right, and judged: int
        self._front: Ints = np.zeros(total, dtype=np.int64)
        self._hits: Ints = np.zeros(work.acceptance.shape, dtype=np.int64)
        self._trials: Ints = np.zeros(work.acceptance.shape, dtype=np.int64)
        self._left, self._now = total, 0.0
        self._events: list[tuple[float, int]] = []
        self._busy_ms: Floats = np.zeros(setup.groups)

    def run(self) -> Outcome:
        for group in self._groups:
            self._start(group)
        while self._left:
            self._now, number = heapq.heappop(self._events)
            self._end(self._groups[number])
            self._start(self._groups[number])
        for end_ms, number in self._events:
            if self._groups[number].size:
                self._busy_ms[number] -= end_ms - self._now  # a step that nobody waits for any more
        return Outcome(
            finish_ms=self._finish_ms,
            winner=self._winner,
            busy_ms=self._busy_ms,
            counts=sum((group.counts for group in self._groups), Counter()),
            races=len(self._raced),
            races_won=int((self._winner != self._home).sum()),
        )

    def _start(self, group: Group) -> None:
        """The group's next step, or a race, or nothing."""
        group.keep(self._winner[group.ids] < 0)
        computed = self._join(group)
        self._reconfigure(group)
        if not group.size:
            self._free.append(group.number)
            if self._setup.racing is not None and self._left:
                self._race(self._setup.racing)
            return
        ms = computed * self._setup.prefill_ms + group.begin()
        self._busy_ms[group.number] += ms
        heapq.heappush(self._events, (self._now + ms, group.number))

    def _end(self, group: Group) -> None:
        """A step is over: note what it yielded, and who ended."""
        if not group.size:
            return  # it has waited for its model
        group.end()
        if group.mode is not Mode.PLAIN:
            self._hits[group.method, group.ids] += group.hits
            self._trials[group.method, group.ids] += group.trials
        self._front[group.ids] = np.maximum(self._front[group.ids], group.position)
        has_ended = group.position >= self._work.length[group.ids]
        first = group.ids[has_ended & (self._winner[group.ids] < 0)]
        self._finish_ms[first], self._winner[first] = self._now, group.number
        self._left -= len(first)
        group.keep(~has_ended)

    def _join(self, group: Group) -> int:
        """Requests that begin, and copies of those that still run somewhere else; returns the tokens to compute."""
        joining, self._joining[group.number] = self._joining[group.number], []
        ids = np.asarray([request for request in joining if self._winner[request] < 0], dtype=np.int64)
        racing = self._setup.racing if group.number in self._racing else None
        group.add(ids, self._front[ids], racing.windows[group.method] if racing else self._setup.window)
        return int(self._front[ids].sum())

    def _reconfigure(self, group: Group) -> None:
        setup = self._setup
        if setup.reconfigure is not None and group.since >= setup.reconfigure_every and group.size:
            group.since = 0.0
            hits, trials = self._hits[group.method, group.ids], self._trials[group.method, group.ids]
            group.reconfigure(setup.reconfigure(hits, trials))

    def _race(self, plan: Racing) -> None:
        """Free groups get a method each, and requests of others (Algorithm 3)."""
        methods = range(len(self._setup.drafters))
        self._racing = {number: method for number, method in self._racing.items() if number not in self._free}
        for number in self._free:
            self._racing[number] = min(methods, key=self._groups_with)
        for request, method, number in self._assigned(plan):
            self._joining[number].append(request)
            self._raced.add((request, method))
        for number in [number for number in self._free if self._joining[number]]:
            self._free.remove(number)
            self._groups[number].method = self._racing[number]
            # the model has to be there before its first step
            heapq.heappush(self._events, (self._now + plan.attach_ms, number))

    def _groups_with(self, method: int) -> int:
        at_home = sum(group.number not in self._racing and group.size > 0 for group in self._groups)
        return list(self._racing.values()).count(method) + (0 if method else at_home)

    def _assigned(self, plan: Racing) -> Iterator[tuple[int, int, int]]:
        """Request, method and group of copies that join, as engines' own ladder assigns them.

        A request gets each method at most once, since a second copy with the same drafter would end at the same time.
        """
        active = np.flatnonzero(self._winner < 0)
        rates = self._hits[0, active] / np.maximum(self._trials[0, active], 1)
        workers = {
            str(number): Worker(str(method), self._groups[number].size + len(self._joining[number]))
            for number, method in self._racing.items()
        }
        found = assign(
            dict(zip(map(str, active.tolist()), rates.tolist(), strict=True)),
            sorted({worker.method for worker in workers.values()}),
            workers,
            most=plan.most,
            running={(str(request), str(method)) for request, method in self._raced},
        )
        yield from ((int(request), int(method), int(number)) for (request, method), number in found.items())
