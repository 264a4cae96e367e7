"""The soak itself: requests come and go, a trainer talks, faults happen, and every few seconds samples are taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .arrivals import Arrival, Mix, arrivals
from .client import PATIENCE_S, Answer, Lost, ask
from .faults import Fault, Faults
from .processes import Holding, disk_bytes, holdings
from .server import Server
from .trainer import Trainer

MOST_TOLD = 20
"""Failures that are told word by word; further ones are counted."""
_DRAIN_S = 120.0
"""For requests that run when the last one has come."""
_CALM_S = 3.0
_COUNTERS = {
    "drafted": "vllm:spec_rollout_drafted_nodes_total",
    "accepted": "vllm:spec_rollout_accepted_nodes_total",
    "failures": "vllm:spec_rollout_failures_total",
    "tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}

_HISTORY = ("epoch", "answers", "memory_bytes", "write_errors", "damaged", "evicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the server."""

    # seconds since the first request could come
    at_s: float
    holdings: Mapping[str, Holding]
    disk_mib: float
    # of _COUNTERS; empty where the server did not answer
    counts: Mapping[str, float]
    # of _HISTORY; empty where there is none
    history: Mapping[str, float]
    # requests that this side has open
    open_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How the server is driven."""

    duration_s: float
    seed: int
    per_second: float
    mix: Mix
    max_tokens: int
    # requests that are open at most: later ones wait on this side, or a slow server would be judged by its queue
    most_open: int
    sample_s: float
    epoch_s: float
    mistake_s: float
    faults: Sequence[Fault]
    # the history's folder, alone in another: a fault may rename it
    history: Path
    is_ours: bool


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    samples: list[Sample] = field(default_factory=list)
    # answers that are to be compared with stock's
    kept: list[Answer] = field(default_factory=list)
    # requests by how they ended: "answered", "left", "lost"; and "late", those that waited on this side
    requests: Counter[str] = field(default_factory=Counter)
    # what was lost, and what routes answered that they should not have
    told: list[str] = field(default_factory=list)
    wrong_answers: int = 0
    trainer: Trainer | None = None
    # before the first request, and after the last one has ended
    idle: tuple[Sample, Sample] | None = None


def parse_counts(text: str) -> dict[str, float]:
    """Sums over labels of what `/metrics` tells, by our names for it."""
    names = {metric: name for name, metric in _COUNTERS.items()}
    found = dict.fromkeys(_COUNTERS, 0.0)
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
    return found


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, load: Load, report: Callable[[int, int], None]) -> None:
        """Args:
        report: told of seconds done, and of all.
        """
        self._server, self._load, self._report = server, load, report
        self._outcome, self._open, self._begin = Outcome(), 0, 0.0

    def run(self) -> Outcome:
        asyncio.run(self._run())
        return self._outcome

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def _run(self) -> None:
        load, outcome = self._load, self._outcome
        # nothing is kept alive: a socket that stays open is then the server's
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._begin = time.monotonic()
            first = await self._sample(session)
            self._begin = time.monotonic()
            beside = [asyncio.create_task(self._watch(session))]
            if load.is_ours:
                outcome.trainer = Trainer(
                    self._server.address, load.seed, load.epoch_s, load.mistake_s, self._note_wrong_answer
                )
                beside.append(asyncio.create_task(outcome.trainer.run(session)))
                beside.append(asyncio.create_task(self._faults()))
            try:
                await self._requests(session)
            finally:
                for task in beside:
                    task.cancel()
                ends = await asyncio.gather(*beside, return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                    raise end
            await asyncio.sleep(_CALM_S)
            outcome.idle = (first, await self._sample(session))

    async def _requests(self, session: aiohttp.ClientSession) -> None:
        load, tasks = self._load, set[asyncio.Task[None]]()
        plan = arrivals(load.seed, load.per_second, load.mix)
        room = asyncio.Semaphore(load.most_open)
        for arrival in takewhile(lambda one: one.at_s < load.duration_s, plan):
            await asyncio.sleep(max(0.0, arrival.at_s - self._now))
            if self._now >= load.duration_s or not self._server.is_alive:
                break
            self._outcome.requests["late"] += room.locked()
            await room.acquire()
            task = asyncio.create_task(self._request(session, arrival, room))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_DRAIN_S)
            for task in stuck:
                task.cancel()
                self._note_lost(f"still open {_DRAIN_S:g} s after the last request came")

    async def _request(self, session: aiohttp.ClientSession, arrival: Arrival, room: asyncio.Semaphore) -> None:
        load, outcome = self._load, self._outcome
        self._open += 1
        try:
            answer = await ask(session, self._server.address, arrival, load.max_tokens, is_ours=load.is_ours)
        except Lost as error:
            self._note_lost(f"request {arrival.number} ({arrival.kind}): {error}")
            return
        finally:
            self._open -= 1
            room.release()
        outcome.requests["left" if answer is None else "answered"] += 1
        if answer is not None and arrival.is_checked:
            outcome.kept.append(answer)
        if answer is not None and outcome.trainer is not None:
            outcome.trainer.finished(answer)

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._outcome.samples.append(await self._sample(session))
            self._report(round(self._now), round(self._load.duration_s))
            await asyncio.sleep(self._load.sample_s)

    async def _sample(self, session: aiohttp.ClientSession) -> Sample:
        counts: dict[str, float] = {}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{self._server.address}/metrics") as response:
                counts = parse_counts(await response.text())
        return Sample(
            at_s=self._now,
            holdings=holdings(self._server.pid),
            disk_mib=disk_bytes(self._load.history.parent) / 2**20,
            counts=counts,
            history=await self._history(session) if self._load.is_ours else {},
            open_requests=self._open,
        )

    async def _history(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """What the history says of itself."""
        try:
            async with session.get(f"{self._server.address}/spec_rollout/history") as response:
                if response.status == 200:
                    kept = (await response.json())["total"].get("store", {})
                    return {name: float(kept[name]) for name in _HISTORY if name in kept}
                self._note_wrong_answer(f"/history answered with {response.status}: {(await response.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._note_wrong_answer(f"/history: {type(error).__name__}: {error}")
        return {}

    async def _faults(self) -> None:
        does = Faults(self._server.pid, self._load.history)
        for fault in self._load.faults:
            await asyncio.sleep(max(0.0, fault.begin_s - self._now))
            with does.inflict(fault.kind):
                await asyncio.sleep(max(0.0, fault.end_s - self._now))

    def _note_lost(self, what: str) -> None:
        self._outcome.requests["lost"] += 1
        self._tell(what)

    def _note_wrong_answer(self, what: str) -> None:
        self._outcome.wrong_answers += 1
        self._tell(what)

    def _tell(self, what: str) -> None:
        if len(self._outcome.told) < MOST_TOLD:
            self._outcome.told.append(f"{self._now:.0f} s: {what}")
