"""Driver of a group: which requests are open, which engine runs which, and what engines said. It knows no Ray.

What is asked of an engine arrives once and in order, or fails with the engine's death. So nothing that was said is ever
looked for: an engine runs what it was given until it reports the end. `ladder.decide` says what is to be done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from vllm_specrollout.cluster.batch import Answer, GroupError, Open
from vllm_specrollout.cluster.ladder import Attach, Command, Copy, Engine, Move, Prices, Rules, decide
from vllm_specrollout.cluster.reports import Given, Part, Report, Wanted
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.scheduling.lengths import MOST_PROBLEMS, Lengths

logger = logging.getLogger("vllm.specrollout")

BEAT_S = 0.1
"""Seconds between two reports of an engine; an answer's end is told at once."""


BEHIND = -1
"""Version of an engine that could not follow the group: it gets nothing until it has what comes next."""


class Lines(Protocol):
    """What reaches the engines."""

    def call(self, engine: str, then: Callable[[Any], None], method: str, *args: Any) -> None:
        """Ask a method of an engine; `then` gets what it answers, unless the engine dies before."""

    def send(self, engine: str, method: str, *args: Any) -> None:
        """The same, and nobody waits for an answer."""


class Driver:
    """
    Args:
        engines: their names.
        clock: seconds, from any zero.
    """

    def __init__(
        self, lines: Lines, engines: Sequence[str], rules: Rules, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = dict.fromkeys(("lost", "resubmitted", "moved", "lent"), 0)
        """Engines lost, requests that went on elsewhere after that; requests moved; drafters lent."""
        self.engines = {name: Engine() for name in engines}
        self.wanted = Wanted()
        self.open: dict[str, Open] = {}
        # in their order
        self.waiting: dict[str, None] = {}
        self.heard: dict[str, float] = {}
        """Engine that reports -> when it last said something new."""
        self.reasons: dict[str, str] = {}
        """Engine that was lost, or is behind -> why."""
        self.listener: Callable[[str, Report], None] = lambda engine, report: None
        """Told of each report before it is taken in."""
        self.rules = rules
        self.lengths = Lengths()
        """Of answers, by their problems."""
        self._lines, self._prices, self._clock = lines, Prices(), clock
        # (engine, run there) -> request; problem -> engine with its siblings
        self._runs: dict[tuple[str, str], str] = {}
        self._homes: dict[str, str] = {}
        self._decided_at, self._is_new = 0.0, True
        for name in engines:
            self._bid(name)

    @property
    def is_brought(self) -> bool:
        """Whether all engines that are up are where the group is, or have refused to get there."""
        return all(one.version in (None, BEHIND, self.wanted.version) for one in self.engines.values())

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, asked: Mapping[str, Open]) -> None:
        """Further requests."""
        self.open |= asked
        self.waiting |= dict.fromkeys(asked)
        self._is_new = True

    def drop(self, requests: Iterable[str]) -> None:
        """Forget requests, wherever they run."""
        for request in requests:
            if self.open[request].engine:
                self._stop(request)
            del self.open[request]
            self.waiting.pop(request, None)

    def take_answers(self, requests: Collection[str]) -> dict[str, Answer]:
        """The answers that there are to these requests, which are forgotten.

        Raises:
            GroupError: one of them has none, and gets none.
        """
        found = {}
        for request in requests:
            own = self.open[request]
            if own.failure is not None:
                raise own.failure
            if own.answer is not None:
                found[request] = own.answer
        for request in found:
            del self.open[request]
        return found

    def decide(self) -> None:
        """Have done what is to be done; at once where something has changed, and else in the next beat."""
        now = self._clock()
        if not self._is_new and now - self._decided_at < BEAT_S:
            return
        self._is_new, self._decided_at = False, now
        waiting = [(request, self.open[request].problem) for request in self.waiting]
        forecasts: dict[str, float] = {}
        if self.lengths.num_known:
            for request, problem in waiting:
                if problem not in forecasts:
                    forecasts[problem] = self._expected(self.open[request])
        for command in decide(
            waiting, self.engines, self.wanted.version, self._homes, self.rules, self._prices, forecasts
        ):
            self._follow(command)

    def _expected(self, own: Open, tokens: int = 0) -> float:
        """Tokens that its answer is expected to have, which has so many now."""
        return self.lengths.expected_total(own.problem, tokens, own.most)

    def _follow(self, command: Command) -> None:
        if isinstance(command, Attach):
            self._attach(command)
            return
        own = self.open[command.request]
        if isinstance(command, Move):
            self.counts["moved"] += 1
            self._stop(command.request)
        else:
            del self.waiting[command.request]
        self._settle(own.problem, command.engine)
        self._run(command.engine, own)

    def _settle(self, problem: str, engine: str) -> None:
        """Its siblings are at home there. Of as many problems as lengths are known; the oldest is forgotten."""
        self._homes.pop(problem, None)
        self._homes[problem] = engine
        if len(self._homes) > MOST_PROBLEMS:
            del self._homes[next(iter(self._homes))]

    def _run(self, name: str, own: Open) -> None:
        answer = own.begin(name, self.wanted.version)
        self._runs[name, own.key] = own.request
        self.engines[name].running[own.request] = Copy(len(own.prompt), len(answer), may_move=own.is_resumable)
        self._lines.send(name, "give", [Given(own.key, own.prompt, own.params, answer)])

    def _attach(self, command: Attach) -> None:
        one, lender = self.engines[command.engine], command.lender
        keys = [self.open[request].key for request in command.requests]
        address = self.engines[lender].drafter if keys else ""
        if keys:
            self.counts["lent"] += lender not in one.lent
            one.lent[lender] = command.requests
        else:
            one.lent.pop(lender, None)

        def then(wrong: str) -> None:
            if wrong:
                # costs help, and nothing else
                logger.warning("Spec rollout: %s drafts for no request of %s: %s", lender, command.engine, wrong)

        self._lines.call(command.engine, then, "attach", lender, address, keys)

    # --- what engines say ---------------------------------------------------------------------------------------------

    def reported(self, name: str, report: Report) -> None:
        self._lines.call(name, lambda found: self.reported(name, found), "report", BEAT_S)
        self.listener(name, report)
        one = self.engines[name]
        one.drafter = report.drafter
        if report.pace is not None:
            batch, steps, seconds = report.pace
            self._prices.stepped(batch, seconds / steps)
        self._prices.filled(*report.filled)
        if report.parts or not one.running:
            self.heard[name] = self._clock()
        for key, part in report.parts.items():
            request = self._runs.get((name, key))
            if request is None:
                continue  # it was stopped here meanwhile
            own = self.open[request]
            own.extend(part)
            copy = one.running[request]
            copy.tokens += len(part.tokens)
            copy.gained += len(part.tokens)
            copy.steps += part.steps
            if self.lengths.num_known:
                copy.left = max(self._expected(own, copy.tokens) - copy.tokens, 1.0)
            if part.finish:
                self._end(name, own, part)

    def _end(self, name: str, own: Open, part: Part) -> None:
        if part.finish == "error":
            own.failure = GroupError(f"{name} refused request {own.request}: {part.reason}", "change the request")
        else:
            own.end(part.finish, part.reason)
            self.lengths.observe(own.problem, len(own.tokens))
        self._is_new = True
        self._stop(own.request, is_over=True)

    def _stop(self, request: str, *, is_over: bool = False) -> None:
        """It runs no more where it ran; what is known of it stays known."""
        name = self.open[request].engine
        key = self.open[request].leave()
        del self._runs[name, key], self.engines[name].running[request]
        if not is_over:
            self._lines.send(name, "cancel", [key])

    def _stop_all(self, name: str) -> list[str]:
        """What this engine ran waits again, before all others."""
        stopped = list(self.engines[name].running)
        for request in stopped:
            self._stop(request, is_over=True)
        self.waiting = dict.fromkeys([*stopped, *self.waiting])
        return stopped

    def equip(self, rules: Rules, models: Sequence[str]) -> None:
        """What may be decided from now on, and the models that draft beside engines: these have one each in turns."""
        self.rules = rules
        for i, (name, one) in enumerate(self.engines.items()):
            one.method = models[i % len(models)] if models else ""
            if one.method and name in self.heard:
                self._lines.send(name, "warm", one.method)

    # --- engines that come and go -------------------------------------------------------------------------------------

    def _bid(self, name: str) -> None:
        """An engine is to get to where the group is. A process that was begun anew has the weights of its start."""
        wanted = self.wanted
        self._lines.call(name, lambda found: self._admitted(name, wanted, *found), "admit", wanted)

    def _admitted(self, name: str, wanted: Wanted, version: int, places: int) -> None:
        one = self.engines[name]
        self._is_new = True
        if wanted != self.wanted:
            if one.version is None:
                self._bid(name)  # the group went on while it loaded
            return
        one.version, one.places = version, places
        if name not in self.heard:
            self._lines.call(name, lambda host: setattr(one, "host", host), "host")
            if one.method:
                self._lines.send(name, "warm", one.method)
            self.reported(name, Report())
        self.heard[name] = self._clock()

    def refuse(self, name: str, error: SpecRolloutError) -> None:
        """It could not get to where the group is."""
        self.engines[name].version, self.reasons[name] = BEHIND, error.cause

    def lose(self, name: str, reason: str) -> None:
        """Its process ended: its requests go on elsewhere, and its next life is waited for.

        Raises:
            GroupError: it has no next life, as it has ended before it was admitted; and no other engine is left.
        """
        one = self.engines[name]
        self.counts["lost"] += 1
        self._is_new = True
        self.reasons[name] = reason
        for request in self._stop_all(name):
            self.open[request].lose()
            self.counts["resubmitted"] += 1
        self.heard.pop(name, None)
        for other in list(self.engines):
            if name in self.engines[other].lent:
                self._attach(Attach(other, name))  # its next life serves at another address
        if one.version is not None:
            self.engines[name] = Engine(method=one.method)
            self._bid(name)
            return
        del self.engines[name]
        logger.warning("Spec rollout: %s is gone for good: %s", name, reason)
        self.check_any()

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

    def bring(self, **what: Any) -> None:
        """All that are up are to get to what is wanted; the others do so when they come up.

        What runs goes on behind the tokens that are known, once its engine is there.
        """
        self.wanted = replace(self.wanted, version=self.wanted.version + 1, **what)
        self._is_new = True
        for name, one in self.engines.items():
            self._stop_all(name)  # being admitted ends it
            one.lent.clear()
            if one.version is not None:
                one.version = self.wanted.version - 1  # one that was behind is on its way again
                self._bid(name)
