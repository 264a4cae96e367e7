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
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from vllm_specrollout.bench.policy.reward import reward

from ..runner.server import Holding, Server, disk_bytes, holdings
from .faults import Fault, inflict
from .load import PATIENCE_S, ClientRequest, Lost, Reply, arrivals, ask

MOST_TOLD = 20
"""Failures that are told word by word; further ones are counted."""
_DRAIN_S = 120.0
"""For requests that run when the last one has come."""
_CALM_S = 3.0
_REWARDS_S = 5.0
"""Between two reports of rewards."""
# metric, and its `stage`
_COUNTERS = {
    "drafted": ("vllm:spec_rollout_nodes_total", "drafted"),
    "accepted": ("vllm:spec_rollout_nodes_total", "accepted"),
    "failures": ("vllm:spec_rollout_failures_total", ""),
    "preemptions": ("vllm:num_preemptions_total", ""),
    "running": ("vllm:num_requests_running", ""),
    "waiting": ("vllm:num_requests_waiting", ""),
}
_OURS = "/spec_rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the server."""

    # seconds since the first request could come
    at_s: float
    holdings: Mapping[str, Holding]
    disk_mib: float
    # of _COUNTERS; empty where the server did not answer
    counts: Mapping[str, float]
    # writes of the history that failed so far
    write_errors: float = 0.0


@dataclass(slots=True)
class Observations:
    """What came of it."""

    samples: list[Sample] = field(default_factory=list)
    # answers that are to be compared with stock's
    kept: list[Reply] = field(default_factory=list)
    # requests by how they ended: "answered", "left", "lost"; and "late", those that waited on this side
    requests: Counter[str] = field(default_factory=Counter)
    # rewards by what became of them, and what a route answered that it should not have
    routes: Counter[str] = field(default_factory=Counter)
    # what was lost or answered wrongly, in words
    told: list[str] = field(default_factory=list)
    # before the first request, and after the last one has ended
    idle: tuple[Sample, Sample] | None = None


def parse_counts(text: str) -> dict[str, float]:
    """Sums over other labels of what `/metrics` tells, by our names for it."""
    names = {metric: name for name, metric in _COUNTERS.items()}
    found = dict.fromkeys(_COUNTERS, 0.0)
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            if name := names.get((sample.name, sample.labels.get("stage", ""))):
                found[name] += sample.value
    return found


class Soak:
    """One run against one server.

    Args:
        plan: the scenario.
        history: the history's folder, alone in another: a fault may rename it.
        report: told of seconds done, and of all.
    """

    def __init__(
        self, server: Server, plan: Any, faults: Sequence[Fault], history: Path, report: Callable[[int, int], None]
    ) -> None:
        self._server, self._plan, self._faults, self._history, self._report = server, plan, faults, history, report
        self._outcome, self._begin = Observations(), 0.0
        # rewards that are not reported yet
        self._due: list[dict[str, Any]] = []

    def run(self) -> Observations:
        asyncio.run(self._run())
        return self._outcome

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def _run(self) -> None:
        # nothing is kept alive: a socket that stays open is then the server's
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        async with aiohttp.ClientSession(self._server.address, connector=connector, timeout=timeout) as session:
            self._begin = time.monotonic()
            first = await self._sample(session)
            self._begin = time.monotonic()
            acts = (self._watch(session), self._epochs(session), self._rewards(session), self._inflict())
            beside = [asyncio.create_task(act) for act in acts]
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
            self._outcome.idle = (first, await self._sample(session))

    async def _requests(self, session: aiohttp.ClientSession) -> None:
        plan, tasks = self._plan, set[asyncio.Task[None]]()
        # later ones wait on this side, or a slow server would be judged by its queue
        room = asyncio.Semaphore(plan.most_open)
        for arrival in takewhile(lambda one: one.at_s < plan.duration_s, arrivals(plan, plan.checked_share)):
            await asyncio.sleep(max(0.0, arrival.at_s - self._now))
            if self._now >= plan.duration_s or not self._server.is_alive:
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

    async def _request(self, session: aiohttp.ClientSession, arrival: ClientRequest, room: asyncio.Semaphore) -> None:
        outcome = self._outcome
        try:
            answer = await ask(session, arrival, self._plan.max_tokens)
        except Lost as error:
            self._note_lost(f"request {arrival.number} ({arrival.kind}): {error}")
            return
        finally:
            room.release()
        outcome.requests["left" if answer is None else "answered"] += 1
        if answer is None:
            return
        if arrival.is_checked:
            outcome.kept.append(answer)
        # answers to problems that come back are worth something
        for index, text in enumerate(answer.texts if arrival.is_recurring else ()):
            value = reward(arrival.problem, text)
            self._due.append({"request_id": answer.request_id, "index": index, "reward": value})

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._outcome.samples.append(await self._sample(session))
            self._report(round(self._now), round(self._plan.duration_s))
            await asyncio.sleep(self._plan.sample_s)

    async def _sample(self, session: aiohttp.ClientSession) -> Sample:
        counts: dict[str, float] = {}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/metrics") as response:
                counts = parse_counts(await response.text())
        kept = await self._call(session.get(f"{_OURS}/history"))
        return Sample(
            at_s=self._now,
            holdings=holdings(self._server.process.pid),
            disk_mib=disk_bytes(self._history.parent) / 2**20,
            counts=counts,
            write_errors=float((kept or {}).get("total", {}).get("store", {}).get("write_errors", 0)),
        )

    async def _epochs(self, session: aiohttp.ClientSession) -> None:
        epoch = 1
        while True:
            await self._call(session.post(f"{_OURS}/epoch", json={"epoch": epoch}))
            await asyncio.sleep(self._plan.epoch_s)
            epoch += 1

    async def _rewards(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(_REWARDS_S)
            due, self._due = self._due, []
            if due:
                counts = await self._call(session.post(f"{_OURS}/rewards", json={"rewards": due}))
                self._outcome.routes.update({f"rewards {kind}": count for kind, count in (counts or {}).items()})

    async def _inflict(self) -> None:
        for fault in self._faults:
            await asyncio.sleep(max(0.0, fault.begin_s - self._now))
            with inflict(fault.kind, self._server.process.pid, self._history):
                await asyncio.sleep(max(0.0, fault.end_s - self._now))

    async def _call(self, request: Any) -> Any:
        """What a route answers; None, and a note, if it does not."""
        try:
            async with request as response:
                if response.status == 200:
                    return await response.json()
                path = response.url.path
                self._note_wrong_answer(f"{path} answered with {response.status}: {(await response.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._note_wrong_answer(f"a route: {type(error).__name__}: {error}")
        return None

    def _note_lost(self, what: str) -> None:
        self._note(self._outcome.requests, "lost", what)

    def _note_wrong_answer(self, what: str) -> None:
        self._note(self._outcome.routes, "wrong", what)

    def _note(self, counter: Counter[str], name: str, what: str) -> None:
        counter[name] += 1
        if len(self._outcome.told) < MOST_TOLD:
            self._outcome.told.append(f"{self._now:.0f} s: {what}")
