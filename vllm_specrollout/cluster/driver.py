"""Driver of a group: which requests are open, which engine runs which, and what engines said. It knows no Ray.

All of it runs in one event loop. Each engine has a task, which brings it to where the group is and then asks it for a
report after the other. What is asked of an engine arrives once and in order, or fails with the engine's death. So
nothing that was said is ever looked for: an engine runs what it was given until it reports the end. At each beat
`ladder.decide` says what is to be done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllm_specrollout.cluster.batch import BeginError, GroupAnswer, GroupError, Open
from vllm_specrollout.cluster.ladder import Copy, GroupEngine, GroupPrices, Run, decide
from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted
from vllm_specrollout.errors import SpecRolloutError, logger
from vllm_specrollout.scheduling.lengths import MOST_PROBLEMS, Lengths

BEAT_S = 0.1
"""Seconds between two decisions, and at least between two reports of an engine; what goes on is told more seldom."""

BEHIND = -1
"""Version of an engine that could not follow the group: it gets nothing until it has what comes next."""
_STRIDE = 256
"""Tokens of an answer after which its length is forecast anew."""


class EngineLost(Exception):
    """The engine's process ended, and with it what was asked of it."""


class Lines(Protocol):
    """What reaches the engines."""

    def call(self, engine: str, method: str, *args: Any) -> Awaitable[Any]:
        """Ask a method of an engine; `admit` reaches the next life where one ends.

        Raises:
            EngineLost: as it says; of `admit`: there is no next life.
            SpecRolloutError: the engine's.
        """

    def send(self, engine: str, method: str, *args: Any) -> None:
        """The same, and nobody waits for an answer."""

    def end(self, engine: str) -> None:
        """End an engine's process, which is begun anew."""


class Driver:
    """
    Args:
        engines: their names.
        ladder: `off`: no request is taken from an engine that runs it.
        patience_s: seconds without a word after which an engine is begun anew.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        lines: Lines,
        engines: Sequence[str],
        ladder: str = "off",
        patience_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = dict.fromkeys(("lost", "resubmitted", "moved"), 0)
        """Engines lost, requests that went on elsewhere after that, and requests moved."""
        self.engines = {name: GroupEngine() for name in engines}
        self.wanted = Wanted()
        self.open: dict[str, Open] = {}
        # in their order
        self.waiting: dict[str, None] = {}
        self.reasons: dict[str, str] = {}
        """Engine that was lost, or is behind -> why."""
        self.ladder, self.patience_s = ladder, patience_s
        self.lengths = Lengths()
        """Of answers, by their problems."""
        self.is_held = False
        """While weights arrive, nothing is given to anybody."""
        self._lines, self._prices, self._clock = lines, GroupPrices(), clock
        # run -> its request; problem -> engine with its siblings
        self._runs: dict[str, Open] = {}
        self._homes: dict[str, str] = {}
        # engine -> when it last said something new
        self._heard: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        # set when engines have got somewhere
        self._news = asyncio.Event()
        # why nothing goes on
        self._stopped: GroupError | None = None

    def start(self) -> None:
        """Have engines brought to where the group is, and hear them, in the loop that runs."""
        self._tasks = [asyncio.ensure_future(self._serve(name)) for name in self.engines]
        self._tasks.append(asyncio.ensure_future(self._beats()))

    def stop(self, error: GroupError) -> None:
        """Hear nobody any more; what is open ends with this error."""
        for task in self._tasks:
            task.cancel()
        self._stopped = error
        self._fail(list(self.open), error)
        self._news.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, asked: Mapping[str, Open]) -> None:
        """Further requests. Each one's `sink` is told when it has its answer, or gets none.

        Raises:
            GroupError: no engine is left.
        """
        self.check_any()
        self.open |= asked
        self.waiting |= dict.fromkeys(asked)

    def drop(self, requests: Iterable[str]) -> None:
        """Forget requests, wherever they run."""
        for request in requests:
            if (own := self.open.pop(request, None)) is not None:
                self._stop(own)
                self.waiting.pop(request, None)

    def beat(self) -> None:
        """Have done what is to be done now."""
        if not self.open or self.is_held:
            return
        if self.engines and all(one.version == BEHIND for one in self.engines.values()):
            self._fail(list(self.waiting), GroupError(f"no engine can follow: {self._behind()}", _FOLLOW))
        self._watch()
        for one in self._decided():
            own, copies = self.open[one.request], self.engines[one.engine].running
            if one.source:
                self.counts["moved"] += 1
                self._stop(own)
            self.waiting.pop(one.request, None)
            # of as many problems as lengths are known of; the oldest is forgotten
            self._homes.pop(own.problem, None)
            self._homes[own.problem] = one.engine
            if len(self._homes) > MOST_PROBLEMS:
                del self._homes[next(iter(self._homes))]
            answer = own.begin(one.engine, self.wanted.version)
            self._runs[own.key] = own
            copies[own.request] = Copy(len(own.prompt), len(answer), may_move=own.is_resumable)
            self._lines.send(one.engine, "give", [Given(own.key, own.prompt, own.params, answer, own.lora)])

    def _decided(self) -> list[Run]:
        waiting = [(request, self.open[request].problem) for request in self.waiting]
        forecasts: dict[str, float] = {}
        if self.lengths.num_known:
            for request, problem in waiting:
                if problem not in forecasts:
                    forecasts[problem] = self._expected(self.open[request])
        known = self.wanted.version, self._homes, self._prices, forecasts
        return decide(waiting, self.engines, *known, moves=self.ladder != "off")

    def _expected(self, own: Open, tokens: int = 0) -> float:
        """Tokens that its answer is expected to have, which has so many now."""
        return self.lengths.expected_total(own.problem, tokens, own.most)

    def _watch(self) -> None:
        """An engine that says nothing new while it runs requests hangs: it is ended, and begun anew."""
        now = self._clock()
        for name, at in self._heard.items():
            if self.engines[name].running and now - at > self.patience_s:
                logger.warning("Spec rollout: %s said nothing for %.0f s and is begun anew", name, self.patience_s)
                self._heard[name] = now
                self._lines.end(name)

    # --- what engines say ---------------------------------------------------------------------------------------------

    def _reported(self, name: str, report: Report) -> None:
        one = self.engines[name]
        if report.pace is not None:
            batch, steps, seconds = report.pace
            self._prices.stepped(batch, seconds / steps)
        self._prices.filled(*report.filled)
        if report.parts or not one.running:
            self._heard[name] = self._clock()
        runs, running, is_known = self._runs, one.running, bool(self.lengths.num_known)
        for key, part in report.parts.items():
            own = runs.get(key)
            if own is None:
                continue  # it was stopped here meanwhile
            own.extend(part)
            copy, count = running[own.request], len(part.tokens)
            copy.tokens += count
            copy.gained += count
            copy.steps += part.steps
            if is_known:
                # an answer's forecast moves slowly, until it is outgrown
                if copy.tokens >= own.asked_at:
                    own.expected = self._expected(own, copy.tokens)
                    own.asked_at = min(int(own.expected), copy.tokens + _STRIDE)
                copy.left = max(own.expected - copy.tokens, 1.0)
            if part.finish:
                self._end(name, own, part)

    def _end(self, name: str, own: Open, part: Part) -> None:
        if part.finish == "error":
            cause = f"{name} refused request {own.request}: {part.reason}"
            self._fail([own.request], GroupError(cause, "change the request"), is_over=True)
            return
        self.lengths.observe(own.problem, len(own.tokens))
        answer = own.end(part)
        self._close(own, answer, is_over=True)

    def _fail(self, requests: Iterable[str], error: GroupError, *, is_over: bool = False) -> None:
        """There will be no answer to these."""
        for request in requests:
            self._close(self.open[request], error, is_over=is_over)

    def _close(self, own: Open, found: GroupAnswer | GroupError, *, is_over: bool = False) -> None:
        self._stop(own, is_over=is_over)
        self.waiting.pop(own.request, None)
        del self.open[own.request]
        own.sink(own.request, found)

    def _stop(self, own: Open, *, is_over: bool = False) -> None:
        """It runs no more where it ran, if anywhere; what is known of it stays known."""
        if not own.engine:
            return
        name, own.engine = own.engine, ""
        del self._runs[own.key], self.engines[name].running[own.request]
        if not is_over:
            self._lines.send(name, "cancel", [own.key])

    def _stop_all(self, name: str) -> list[Open]:
        """What this engine ran waits again, before all others."""
        stopped = [self.open[request] for request in self.engines[name].running]
        for own in stopped:
            self._stop(own, is_over=True)
        self.waiting = dict.fromkeys([*(own.request for own in stopped), *self.waiting])
        return stopped

    # --- engines that come and go -------------------------------------------------------------------------------------

    @property
    def starting(self) -> list[str]:
        """Engines that load."""
        return [name for name, one in self.engines.items() if one.version is None]

    async def bring(self, **what: Any) -> None:
        """All that are up are to get to what is wanted; the others do so when they come up.

        What runs goes on behind the tokens that are known, once its engine is there.

        Raises:
            GroupError: some could not.
        """
        self.wanted = replace(self.wanted, version=self.wanted.version + 1, **what)
        self._interrupt()
        for one in self.engines.values():
            if one.version is not None:
                one.version = self.wanted.version - 1  # one that was behind is on its way again
        # those that are up are there, or have refused to get there
        await self.until(lambda: all(o.version in (None, BEHIND, self.wanted.version) for o in self.engines.values()))
        self.check_any()
        if behind := self._behind():
            count = sum(one.version == BEHIND for one in self.engines.values())
            raise GroupError(
                f"{count} of {len(self.engines)} engines could not follow: {behind}",
                "they get no request until they can follow the next change",
            )

    def hold(self) -> None:
        """From now on nobody gets anything, until `is_held` is false again."""
        self.is_held = True
        self._interrupt()

    def _interrupt(self) -> None:
        for name, one in self.engines.items():
            keys = [self.open[request].key for request in one.running]
            self._stop_all(name)
            self._lines.send(name, "cancel", keys)  # so that it reports at once

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until engines have got somewhere.

        Raises:
            GroupError: the driver was stopped.
        """
        while not holds():
            if self._stopped is not None:
                raise self._stopped
            self._news.clear()
            await self._news.wait()

    def check_any(self) -> None:
        """
        Raises:
            GroupError: no engine is left.
        """
        if not self.engines:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
            raise GroupError(
                f"no engine is left: {why}", "`LLM(...)` with the same arguments says more; see Ray's logs"
            )

    def _behind(self) -> str:
        return "; ".join(f"{n}: {self.reasons[n]}" for n, one in self.engines.items() if one.version == BEHIND)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                self.beat()
            except Exception as error:  # else whoever waits for an answer would wait for ever
                logger.exception("Spec rollout: a group's driver failed")
                self._fail(list(self.open), GroupError(f"the group failed: {error!r}", "report this, with the log"))

    async def _serve(self, name: str) -> None:
        """An engine, through all its lives."""
        while True:
            try:
                if self.engines[name].version in (BEHIND, self.wanted.version):
                    self._reported(name, await self._lines.call(name, "report", BEAT_S))
                else:
                    await self._admit(name)
            except EngineLost as error:
                if not self._lose(name, str(error)):
                    return
            except Exception:  # an engine whose word cannot be taken is as good as dead
                logger.exception("Spec rollout: %s is begun anew", name)
                self._lines.end(name)

    async def _admit(self, name: str) -> None:
        """It gets to where the group is. A process that was begun anew has the weights of its start."""
        wanted, one = self.wanted, self.engines[name]
        try:
            version, one.places, one.host = await self._lines.call(name, "admit", wanted)
        except BeginError as error:
            one.version = None  # another life would not begin either
            raise EngineLost(error.cause) from None
        except SpecRolloutError as error:
            version, self.reasons[name] = BEHIND, error.cause
            logger.warning("Spec rollout: %s gets no request, as it cannot follow the group: %s", name, error.cause)
        if wanted == self.wanted:  # else the group went on while it loaded
            one.version = version
        self._heard[name] = self._clock()
        self._news.set()

    def _lose(self, name: str, reason: str) -> bool:
        """Its process ended: its requests go on elsewhere. Whether it has a next life.

        It has none if it ends before it was admitted: that was asked of its next life as well.
        """
        one = self.engines[name]
        self.counts["lost"] += 1
        self.reasons[name] = reason
        for own in self._stop_all(name):
            self.counts["resubmitted"] += 1
            if (error := own.lose()) is not None:
                self._fail([own.request], error)
        self._heard.pop(name, None)
        has_more = one.version is not None
        if has_more:
            self.engines[name] = GroupEngine()
        else:
            del self.engines[name]
            logger.warning("Spec rollout: %s is gone for good: %s", name, reason)
            try:
                self.check_any()
            except GroupError as error:
                self._fail(list(self.open), error)
        self._news.set()
        return has_more


_FOLLOW = "give weights that they can load: `status` says what each one lacks"
