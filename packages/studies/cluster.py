"""One batch on many engines, event by event, decided by the product's own `ladder.decide` and `lend`, at every beat.

Between two events an engine's batch is what it was, so all its steps until then are one event: each request advances by
its mean tokens per step. An event is the end of an answer, a beat, or a failure. Time is in milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from vllm_specrollout.bench.studies.answers import Workload
from vllm_specrollout.bench.studies.formulas import Floats, Ints, StepLine, best_window

from vllm_specrollout.cluster import ladder
from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate, step_time, stream
from vllm_specrollout.replay.anchors import RealSteps

_ROUNDING = 1e-6  # steps
_LEVELS = 50.0  # of acceptance: as many speeds are computed
_MODEL = "model"
Steps = StepLine | RealSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Engines alike, what they draft with, and what may be decided.

    The first method of a workload drafts in the engine's own step, or ahead of it; the second is the warm drafter,
    ahead of the engine that it is lent to.
    """

    engines: int
    # of one host, within which drafters are lent
    per_host: int
    # requests of an engine at once
    places: int
    verifier: Steps
    drafters: tuple[StepLine, StepLine]
    # whether engines draft: in their own steps, or with a device apart for it, ahead of them
    drafts: bool = True
    is_apart: bool = False
    prompt: int = 500
    # answers of a problem
    samples: int = 1
    # per token
    prefill_ms: float = 0.03
    # more of a step that holds prompts
    prompt_ms: float = 0.0
    # `off`, `move` or `attach`; and requests of one lent drafter
    ladder: str = "off"
    most: int = 4
    beat_ms: float = 1000.0
    # when, which engines, and after how long they are back with the group's weights
    failures: tuple[tuple[float, range], ...] = ()
    restart_ms: float = 120_000.0


@dataclass(slots=True)
class Outcome:
    """What became of a batch."""

    # [N] ms at which each answer ended; nan before that
    finish_ms: Floats
    # of commands and resubmissions by kind
    counts: Counter[str] = field(default_factory=Counter)
    # tokens that were generated, engines' steps, and those of each request
    tokens: float = 0.0
    steps: float = 0.0
    request_steps: float = 0.0
    busy_ms: float = 0.0

    @property
    def makespan_ms(self) -> float:
        return float(self.finish_ms.max())

    def idle(self, engines: int) -> float:
        """Of so many engines' time, the part in which they had nothing to do."""
        return 1.0 - self.busy_ms / (engines * self.makespan_ms)

    def running(self, times: Floats) -> Ints:
        """How many requests have not ended by these times, in ms."""
        return len(self.finish_ms) - np.searchsorted(np.sort(self.finish_ms), times, side="right")


@cache
def own_window(p: float, batch: int, verifier: Steps, drafter: StepLine) -> int:
    """The best for a batch that is accepted alike."""
    return best_window(coupled_rate, p, batch, verifier, drafter)


@cache
def lent_drafts(p: float, batch: int, most: int, verifier: Steps, drafter: StepLine) -> tuple[float, float]:
    """Tokens and drafts per step, by a drafter that has so many requests at most and an engine that never waits."""
    window = best_window(decoupled_rate, p, most, verifier, drafter)
    found = stream(p, window, window * drafter.ms(most), step_time(verifier, batch, 0.0))
    return found.tokens, found.drafts


@dataclass(slots=True)
class _Pace:
    """A request at an engine: where it was at which of the engine's steps, and how it goes on."""

    copy: ladder.Copy
    tokens: float
    since: float
    joined: float
    began: float
    each: float = 1.0
    drafts: float = 0.0
    end: float = math.inf


class _Worker:
    """An engine as it is; `view` is what the ladder hears of it."""

    __slots__ = ("at", "level", "name", "paces", "stamp", "step_ms", "steps", "view", "window")

    def __init__(self, name: str, host: str, places: int) -> None:
        self.name, self.level, self.window, self.stamp = name, 0, 0, 0
        self.view = ladder.GroupEngine(version=1, places=places, host=host, drafter=name, method=_MODEL)
        # steps done by `at`, which lies ahead while contexts are computed
        self.steps, self.at, self.step_ms = 0.0, 0.0, 1.0
        self.paces: dict[str, _Pace] = {}


def simulate(work: Workload, site: Site, first: Mapping[str, str]) -> Outcome:
    """Run a batch to its last answer's end.

    Args:
        first: request (`r0`, ...) -> engine (`e0`, ...) that begins with it; the others wait.
    """
    return _Batch(work, site, first).run()


class _Batch:
    def __init__(self, work: Workload, site: Site, first: Mapping[str, str]) -> None:
        self._site, self._first = site, first
        self._length = dict(zip((f"r{i}" for i in range(len(work.length))), work.length.tolist(), strict=True))
        levels = np.clip(np.round(work.acceptance * _LEVELS) / _LEVELS, 0.0, 1.0 - 0.5 / _LEVELS)
        self._acceptance = dict(zip(self._length, levels.T.tolist(), strict=True))
        self._workers = {f"e{i}": _Worker(f"e{i}", f"h{i // site.per_host}", site.places) for i in range(site.engines)}
        # tokens that the driver has heard
        self._heard = dict.fromkeys(self._length, 0.0)
        self._waiting = [request for request in self._length if request not in first]
        self._prices = ladder.GroupPrices()
        self._finish: dict[str, float] = {}
        self._outcome = Outcome(np.full(len(self._length), np.nan))
        # (ms, number, what happens, to whom, the stamp with which it counts)
        self._events: list[tuple[float, int, Callable[[Any], None], Any, int]] = []
        self._number, self._now, self._has_changed = 0, 0.0, True

    def run(self) -> Outcome:
        begun: dict[str, list[str]] = {}
        for request, name in self._first.items():
            begun.setdefault(name, []).append(request)
        for name, requests in begun.items():
            self._join(self._workers[name], requests)
            self._replan(self._workers[name])
        for ms, engines in self._site.failures:
            self._at(ms, self._fail, engines)
        self._at(self._site.beat_ms, self._beat, None)
        while len(self._finish) < len(self._length):
            self._now, _, happens, whom, stamp = heapq.heappop(self._events)
            if not isinstance(whom, _Worker) or whom.stamp == stamp:
                happens(whom)
        self._outcome.finish_ms = np.asarray([self._finish[request] for request in self._length])
        return self._outcome

    def _at(self, ms: float, happens: Callable[[Any], None], whom: Any) -> None:
        self._number += 1
        stamp = whom.stamp if isinstance(whom, _Worker) else 0
        heapq.heappush(self._events, (ms, self._number, happens, whom, stamp))

    def _join(self, worker: _Worker, requests: Iterable[str]) -> None:
        """Requests begin with the tokens that are known, whose KV is computed while the others wait."""
        self._advance(worker)
        computed, site = 0.0, self._site
        for request in requests:
            tokens = self._heard[request]
            copy = ladder.Copy(site.prompt, int(tokens))
            worker.paces[request] = _Pace(copy, tokens, worker.steps, worker.steps, tokens)
            worker.view.running[request] = copy
            computed += site.prompt + tokens
        ms = computed * site.prefill_ms + site.prompt_ms
        self._prices.filled(int(computed), ms / 1e3)
        worker.at += ms
        self._outcome.busy_ms += ms

    def _leave(self, worker: _Worker, request: str) -> None:
        """A request leaves: its engine is brought up to now first, so that `_replan` finds all where they are."""
        self._advance(worker)
        pace = worker.paces.pop(request)
        del worker.view.running[request]
        self._outcome.tokens += self._tokens(worker, pace) - pace.began
        self._outcome.request_steps += worker.steps - pace.joined

    def _advance(self, worker: _Worker) -> None:
        passed = self._now - worker.at
        if passed > 0.0:
            worker.at = self._now
            if worker.paces:
                self._outcome.busy_ms += passed
                self._outcome.steps += passed / worker.step_ms
                worker.steps += passed / worker.step_ms

    def _tokens(self, worker: _Worker, pace: _Pace) -> float:
        return pace.tokens + pace.each * (worker.steps - pace.since)

    def _replan(self, worker: _Worker, *, is_lent_anew: bool = True) -> None:
        """After a change of its batch: tokens per step, what a step takes, and when the next answer ends."""
        self._advance(worker)
        worker.stamp += 1
        self._has_changed = True
        if not worker.paces:
            return
        batch = len(worker.paces)
        # batches up to a power of two are drafted for alike, as their graphs are one
        level = 1 << (batch - 1).bit_length()
        if is_lent_anew or level != worker.level:
            self._redraft(worker, level)
        worker.step_ms = self._step_ms(batch, sum(pace.drafts for pace in worker.paces.values()), worker.window)
        self._prices.stepped(batch, worker.step_ms / 1e3)
        steps = min(pace.end for pace in worker.paces.values()) - worker.steps
        self._at(worker.at + max(steps, 0.0) * worker.step_ms, self._end, worker)

    def _step_ms(self, batch: int, drafts: float, window: int) -> float:
        return self._site.verifier.ms(batch, drafts / batch) + window * self._site.drafters[0].ms(batch)

    def _redraft(self, worker: _Worker, level: int) -> None:
        """What each request gets of the engine's own drafts and of a drafter that is lent to it, where that pays.

        Engines draft where all together get more tokens per millisecond by it, as a budget chooses.
        """
        site, batch, lent = self._site, len(worker.paces), set().union(*worker.view.lent.values())
        verifier, (drafter, model) = site.verifier, site.drafters
        own = sum(self._acceptance[request][0] for request in worker.paces) / batch
        plain: dict[str, tuple[float, float]] = dict.fromkeys(worker.paces, (1.0, 0.0))
        rates = [(request, self._acceptance[request][0]) for request in worker.paces]
        # window that the step waits for, request -> tokens, drafts; and so again behind tokens per ms and a number
        drafted: list[tuple[int, dict[str, tuple[float, float]]]] = [(0, plain)]
        ways: list[tuple[float, int, int, dict[str, tuple[float, float]]]] = []
        if site.drafts and site.is_apart:
            drafted.append((0, {r: lent_drafts(p, level, level, verifier, drafter) for r, p in rates}))
        elif site.drafts:
            window = own_window(round(own, 2), level, verifier, drafter)
            drafted.append((window, {r: ((1.0 - p ** (window + 1)) / (1.0 - p), float(window)) for r, p in rates}))
        for window, each in drafted:
            for helped in (False, True) if lent else (False,):
                if helped:
                    known = {r: self._acceptance[r][1] for r in lent if r in each}
                    gained = {r: lent_drafts(p, level, site.most, verifier, model) for r, p in known.items()}
                    each = each | {r: max(each[r], one) for r, one in gained.items()}
                tokens, drafts = (sum(column) for column in zip(*each.values(), strict=True))
                ways.append((tokens / self._step_ms(batch, drafts, window), len(ways), window, each))
        _, _, worker.window, chosen = max(ways)
        worker.level = level
        for request, pace in worker.paces.items():
            pace.tokens, pace.since = self._tokens(worker, pace), worker.steps
            pace.each, pace.drafts = chosen[request]
            pace.end = worker.steps + (self._length[request] - pace.tokens) / pace.each

    def _end(self, worker: _Worker) -> None:
        """Answers that are complete."""
        self._advance(worker)
        for request in [r for r, pace in worker.paces.items() if pace.end <= worker.steps + _ROUNDING]:
            self._finish[request] = self._now
            self._leave(worker, request)
        self._replan(worker, is_lent_anew=False)

    def _beat(self, _: None) -> None:
        """What every engine reports, and what is decided of it."""
        if self._has_changed and (self._waiting or self._site.ladder != "off"):
            self._has_changed = False
            for worker in self._workers.values():
                self._report(worker)
            engines = {name: worker.view for name, worker in self._workers.items()}
            waiting = [(request, f"p{int(request[1:]) // self._site.samples}") for request in self._waiting]
            runs = ladder.decide(waiting, engines, 1, {}, self._prices, {}, moves=self._site.ladder != "off")
            most = self._site.most if self._site.ladder == "attach" else 0
            self._carry_out([*runs, *ladder.lend(engines, most, {one.engine for one in runs})])
        if not self._events:
            raise RuntimeError(f"{len(self._length) - len(self._finish)} requests are lost: nothing more would happen")
        self._at(self._now + self._site.beat_ms, self._beat, None)

    def _report(self, worker: _Worker) -> None:
        self._advance(worker)
        for request, pace in worker.paces.items():
            copy, tokens = pace.copy, self._tokens(worker, pace)
            copy.tokens, copy.gained, copy.steps = (
                int(tokens),
                int(tokens - pace.began),
                int(worker.steps - pace.joined),
            )
            self._heard[request] = max(self._heard[request], tokens)

    def _carry_out(self, commands: Iterable[ladder.Run | ladder.Attach]) -> None:
        joining: dict[str, list[str]] = {}
        touched: dict[str, None] = {}
        for one in commands:
            touched[one.engine] = None
            if isinstance(one, ladder.Attach):
                self._outcome.counts["attach"] += 1
                lent = self._workers[one.engine].view.lent
                lent.pop(one.lender, None)
                if one.requests:
                    lent[one.lender] = one.requests
                continue
            self._outcome.counts["move" if one.source else "run"] += 1
            if one.source:
                touched[one.source] = None
                self._leave(self._workers[one.source], one.request)
            joining.setdefault(one.engine, []).append(one.request)
        for name, requests in joining.items():
            self._join(self._workers[name], requests)
        begun = {request for requests in joining.values() for request in requests}
        self._waiting = [request for request in self._waiting if request not in begun]
        for name in touched:
            self._replan(self._workers[name])

    def _fail(self, engines: range) -> None:
        """Engines die with all that they hold; what nobody else runs is dealt anew, from the tokens heard."""
        dead = [self._workers[f"e{i}"] for i in engines if f"e{i}" in self._workers]
        for worker in dead:
            # tokens were streamed until now
            self._report(worker)
            for request in list(worker.paces):
                self._leave(worker, request)
                self._waiting.append(request)
                self._outcome.counts["resubmitted"] += 1
            worker.view.version, worker.view.lent = None, {}
            self._replan(worker)
            self._at(self._now + self._site.restart_ms, self._restart, worker.name)
        gone = {worker.name for worker in dead}
        for worker in self._workers.values():
            lost = gone & set(worker.view.lent)
            for name in lost:
                del worker.view.lent[name]
            if lost:
                self._replan(worker)

    def _restart(self, name: str) -> None:
        self._workers[name].view.version = 1
        self._has_changed = True
