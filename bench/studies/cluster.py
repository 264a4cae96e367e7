"""One batch on many engines, event by event, decided by what the product decides: `ladder.decide`, at every beat.

Between two events an engine's batch is what it was, so all its steps until then are one event: each request advances by
its mean tokens per step. An event is the end of an answer, a beat, or a failure. Time is in milliseconds.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from vllm_specrollout.bench.studies.formulas import Floats, StepLine, best_window
from vllm_specrollout.bench.studies.group import Workload

from vllm_specrollout.cluster import ladder
from vllm_specrollout.cluster.rates import coupled_rate, decoupled_rate, plain_rate, step_time, stream

_ROUNDING = 1e-6  # steps
_LEVELS = 50.0  # of acceptance: as many speeds are computed
_MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Engines alike, what they draft with, and what may be decided.

    The first method of a workload drafts in the engine's own step; the second is the warm drafter, ahead of the engine
    that it is lent to.
    """

    engines: int
    # of one host, within which drafters are lent
    per_host: int
    # requests of an engine at once
    places: int
    verifier: StepLine
    drafters: tuple[StepLine, StepLine]
    # whether engines draft in their own steps
    drafts: bool = True
    prompt: int = 500
    # answers of a problem
    samples: int = 1
    # per token
    prefill_ms: float = 0.03
    rules: ladder.Rules = ladder.Rules()
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
    # tokens that were generated
    tokens: float = 0.0
    busy_ms: float = 0.0
    # processor time of this process in `decide`
    decide_s: float = 0.0

    @property
    def makespan_ms(self) -> float:
        return float(self.finish_ms.max())


class Speeds:
    """Tokens and drafts per step of a request, by what drafts for it and how many run beside it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        # (acceptance, batch) -> window of an engine's own drafts
        self.window: Callable[[float, int], int] = cache(self._window)
        # (acceptance, batch) -> tokens, drafts
        self.lent: Callable[[float, int], tuple[float, float]] = cache(self._lent)

    def _window(self, p: float, batch: int) -> int:
        """The best for a batch that is accepted alike; 0 where plain decoding is faster."""
        site = self._site
        window = best_window(coupled_rate, p, batch, site.verifier, site.drafters[0])
        rate = coupled_rate(site.drafters[0], site.verifier, batch, window, p)
        return window if site.drafts and rate > plain_rate(site.verifier, batch) else 0

    def _lent(self, p: float, batch: int) -> tuple[float, float]:
        """A drafter with a full house, b_max requests, ahead of an engine that never waits."""
        site, most = self._site, self._site.rules.most
        window = best_window(decoupled_rate, p, most, site.verifier, site.drafters[1])
        found = stream(p, window, window * site.drafters[1].ms(most), step_time(site.verifier, batch, 0.0))
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
        self.view = ladder.Engine(version=1, places=places, host=host, drafter=name, method=_MODEL)
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
        self._site, self._speeds, self._first = site, Speeds(site), first
        self._length = dict(zip((f"r{i}" for i in range(len(work.length))), work.length.tolist(), strict=True))
        levels = np.clip(np.round(work.acceptance * _LEVELS) / _LEVELS, 0.0, 1.0 - 0.5 / _LEVELS)
        self._acceptance = dict(zip(self._length, levels.T.tolist(), strict=True))
        self._workers = {f"e{i}": _Worker(f"e{i}", f"h{i // site.per_host}", site.places) for i in range(site.engines)}
        # request -> engine that runs it, if any; tokens that the driver has heard
        self._owners: dict[str, list[str]] = {request: [] for request in self._length}
        self._heard = dict.fromkeys(self._length, 0.0)
        self._waiting = [request for request in self._length if request not in first]
        self._prices = ladder.Prices()
        self._prices.filled(site.prompt, site.prompt * site.prefill_ms / 1e3)
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
            for request in requests:
                self._join(self._workers[name], request)
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

    def _join(self, worker: _Worker, request: str) -> None:
        """A copy begins with the tokens that are known, whose KV is computed while the others wait."""
        self._advance(worker)
        tokens, site = self._heard[request], self._site
        copy = ladder.Copy(site.prompt, int(tokens))
        worker.paces[request] = _Pace(copy, tokens, worker.steps, worker.steps, tokens)
        worker.view.running[request] = copy
        self._owners[request].append(worker.name)
        worker.at += (site.prompt + tokens) * site.prefill_ms
        self._outcome.busy_ms += (site.prompt + tokens) * site.prefill_ms

    def _leave(self, worker: _Worker, request: str) -> None:
        """A copy is over: its engine is brought up to now first, so that `_replan` finds all where they are."""
        self._advance(worker)
        pace = worker.paces.pop(request)
        del worker.view.running[request]
        self._owners[request].remove(worker.name)
        self._outcome.tokens += self._tokens(worker, pace) - pace.began

    def _advance(self, worker: _Worker) -> None:
        passed = self._now - worker.at
        if passed > 0.0:
            worker.at = self._now
            if worker.paces:
                self._outcome.busy_ms += passed
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
        batch, site = len(worker.paces), self._site
        # batches up to a power of two are drafted for alike, as their graphs are one
        level = 1 << (batch - 1).bit_length()
        if is_lent_anew or level != worker.level:
            self._redraft(worker, level)
        drafts = sum(pace.drafts for pace in worker.paces.values())
        worker.step_ms = site.verifier.step_ms(batch, drafts) + worker.window * site.drafters[0].step_ms(batch)
        self._prices.stepped(len(worker.paces), worker.step_ms / 1e3)
        steps = min(pace.end for pace in worker.paces.values()) - worker.steps
        self._at(worker.at + max(steps, 0.0) * worker.step_ms, self._end, worker)

    def _redraft(self, worker: _Worker, level: int) -> None:
        """A window for the batch, and what each request gets of it or of a drafter that is lent to it."""
        own = [self._acceptance[request][0] for request in worker.paces]
        worker.level, worker.window = level, self._speeds.window(round(sum(own) / len(own), 2), level)
        lent = set().union(*worker.view.lent.values())
        for request, pace in worker.paces.items():
            p, model = self._acceptance[request]
            gained = (1.0 - p ** (worker.window + 1)) / (1.0 - p), float(worker.window)
            if request in lent:
                gained = max(gained, self._speeds.lent(model, level))
            pace.tokens, pace.since = self._tokens(worker, pace), worker.steps
            pace.each, pace.drafts = gained
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
        if self._has_changed and (self._waiting or self._site.rules.ladder != "off"):
            self._has_changed = False
            for worker in self._workers.values():
                self._report(worker)
            begun = time.process_time()
            engines = {name: worker.view for name, worker in self._workers.items()}
            waiting = [(request, f"p{int(request[1:]) // self._site.samples}") for request in self._waiting]
            commands = ladder.decide(waiting, engines, 1, {}, self._site.rules, self._prices)
            self._outcome.decide_s += time.process_time() - begun
            self._carry_out(commands)
        if not self._events:
            raise RuntimeError(f"{len(self._length) - len(self._finish)} requests are lost: nothing more would happen")
        self._at(self._now + self._site.beat_ms, self._beat, None)

    def _report(self, worker: _Worker) -> None:
        self._advance(worker)
        for request, pace in worker.paces.items():
            tokens = self._tokens(worker, pace)
            pace.copy.tokens, pace.copy.gained = int(tokens), int(tokens - pace.began)
            pace.copy.steps = int(worker.steps - pace.joined)
            self._heard[request] = max(self._heard[request], tokens)

    def _carry_out(self, commands: Iterable[ladder.Command]) -> None:
        touched: dict[str, None] = {}
        for one in commands:
            worker = self._workers[one.engine]
            self._outcome.counts[type(one).__name__.lower()] += 1
            touched[one.engine] = None
            if isinstance(one, ladder.Attach):
                worker.view.lent.pop(one.lender, None)
                if one.requests:
                    worker.view.lent[one.lender] = one.requests
                continue
            if isinstance(one, ladder.Move):
                touched[one.source] = None
                self._leave(self._workers[one.source], one.request)
            self._join(worker, one.request)
        self._waiting = [request for request in self._waiting if not self._owners[request]]
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
                if not self._owners[request]:
                    self._waiting.append(request)
                    self._outcome.counts["resubmitted"] += 1
            worker.view.version = None
            worker.view.lent.clear()
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
