"""Coordinator of a ladder: which idle worker helps which request, when that is over, and who carries it out.

Source: SpecActor, sections 4.2 and 4.3; Algorithm 3 is `assign` and `lend` of `cluster/assignment.py`. It decides on
the workers' latest reports, each of them the whole state of a worker. So a coordinator that begins anew knows all after
one round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_specrollout.cluster.assignment import Lender, Worker, assign, lend
from vllm_specrollout.cluster.group.channel import Hub, ZmqHub, wait
from vllm_specrollout.cluster.group.messages import Attach, Command, Detach, Race, Report
from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.errors import ConfigError

MODES = ("race", "attach")
_POLL_S = 0.2
SILENCE_S = 10.0
"""Seconds without a report after which a worker counts as gone."""
_ANSWER_S = 2.0  # until a command counts as lost, and may be given again
_REMEMBERED = 4096  # requests that are known to be complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may be decided.

    Raises:
        ConfigError: a value out of range.
    """

    # `race`: an idle worker runs the request as well; `attach`: its drafter drafts for the worker that does
    mode: str = "race"
    # drafting methods for racing, best first
    methods: tuple[str, ...] = ("history", "ngram")
    # b_max: requests of others that a worker helps with
    most: int = 4
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_range("most", self.most, 1, 4096)
        check_range("silence_s", self.silence_s, 0.1, 86400.0)
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ConfigError(f"`methods` is {list(self.methods)}", "name one or more, each once")


class Coordinator:
    """Hears workers, and decides."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        # worker -> its latest report, and when that came
        self._heard: dict[str, tuple[Report, float]] = {}
        # (worker, command) given and not seen to have worked yet -> when
        self._given: dict[tuple[str, Command], float] = {}
        self._complete: deque[str] = deque(maxlen=_REMEMBERED)

    @property
    def workers(self) -> list[str]:
        """Those that are there."""
        return list(self._heard)

    def hear(self, worker: str, report: Report, now: float) -> None:
        """Take in what a worker does; `now` in seconds, from any zero."""
        self._heard[worker] = (report, now)
        self._complete.extend(report.finished)

    def decide(self, now: float) -> list[tuple[str, Command]]:
        """(worker, command) of all that is to be done now. Nobody is told twice while an answer may be on its way."""
        self._heard = {name: own for name, own in self._heard.items() if now - own[1] <= self.rules.silence_s}
        self._given = {key: at for key, at in self._given.items() if now - at < _ANSWER_S and key[0] in self._heard}
        reports = {name: own[0] for name, own in self._heard.items()}
        wanted = self._detaches(reports)
        wanted += self._races(reports) if self.rules.mode == "race" else self._attaches(reports)
        new = [one for one in wanted if one not in self._given]
        self._given |= dict.fromkeys(new, now)
        return new

    # --- what is over -------------------------------------------------------------------------------------------------

    def _detaches(self, reports: dict[str, Report]) -> list[tuple[str, Command]]:
        """Drafters whose worker is gone or has requests on its devices again, those that are dead, and those that draft
        for nobody."""
        out: list[tuple[str, Command]] = []
        for name, report in reports.items():
            own = {one.request for one in report.running}
            for link in report.links:
                lender = reports.get(link.drafter)
                is_lent = lender is not None and lender.drafter and _is_free(link.drafter, reports)
                if not is_lent or not own.intersection(link.requests):
                    out.append((name, Detach(link.drafter)))
        return out

    # --- who helps ----------------------------------------------------------------------------------------------------

    # Only a worker whose devices are idle helps: on one that another worker runs requests on, it would take more time
    # than it saves.

    def _races(self, reports: dict[str, Report]) -> list[tuple[str, Command]]:
        racing = self._pending(Race)
        freed, workers, running = [], {}, set()
        for name, report in reports.items():
            running |= {(one.request, report.method) for one in report.running}
            here = {one.request for one in report.running}
            coming = [race for race in racing.get(name, []) if race.request not in here]
            running |= {(race.request, race.method) for race in coming}
            if not report.running and not coming:
                freed.append(name)
            elif all(one.is_copy for one in report.running):
                method = report.method if report.running else coming[0].method
                workers[name] = Worker(method, len(report.running) + len(coming))
            else:
                # it counts for its method, and has no room for others' requests
                workers[name] = Worker(report.method, self.rules.most)
        found = assign(
            self._acceptance(reports),
            self.rules.methods,
            freed,
            workers,
            most=self.rules.most,
            running=running,
            may_serve=lambda worker, _: _shares_none(worker, reports),
        )
        return [(worker, Race(request, method)) for (request, method), worker in found.items()]

    def _attaches(self, reports: dict[str, Report]) -> list[tuple[str, Command]]:
        """Idle workers lend their drafters, each to one worker; a straggler may get one of each model."""
        acceptance = self._acceptance(reports)
        running = {name: self._own(report, acceptance) for name, report in reports.items() if report.running}
        found = lend(running, self._lenders(reports, running), most=self.rules.most)
        return [(one.to, Attach(name, reports[name].drafter, one.requests)) for name, one in found.items()]

    def _lenders(self, reports: dict[str, Report], running: dict[str, dict[str, float]]) -> dict[str, Lender]:
        """Idle workers with a drafter, and whom they draft for, what is on its way included. One that is to be let go
        first is left out."""
        lent: dict[str, dict[str, tuple[str, ...]]] = {}
        for name, report in reports.items():
            for link in report.links:
                lent.setdefault(link.drafter, {})[name] = link.requests
        for name, given in self._pending(Attach).items():
            for attach in given:
                lent.setdefault(attach.drafter, {})[name] = attach.requests
        lenders = {}
        for name, report in reports.items():
            if not report.drafter or not _is_free(name, reports):
                continue
            places = lent.get(name, {})
            if not places:
                lenders[name] = Lender(report.drafter_model)
            elif len(places) == 1:
                ((to, requests),) = places.items()
                left = tuple(request for request in requests if request in running.get(to, {}))
                if left:
                    lenders[name] = Lender(report.drafter_model, to, left)
        return lenders

    def _own(self, report: Report, acceptance: dict[str, float]) -> dict[str, float]:
        return {one.request: acceptance[one.request] for one in report.running if one.request in acceptance}

    def _acceptance(self, reports: dict[str, Report]) -> dict[str, float]:
        """Active request -> share of its drafted tokens that was accepted, where it runs best; 0: none was drafted."""
        complete = set(self._complete)
        found: dict[str, float] = {}
        for report in reports.values():
            for one in report.running:
                if one.request not in complete:
                    rate = one.matched / one.tried if one.tried else 0.0
                    found[one.request] = max(rate, found.get(one.request, 0.0))
        return found

    def _pending(self, kind: type) -> dict[str, list[Any]]:
        """Worker -> commands of this kind that it was given and has not followed yet, as far as is known."""
        out: dict[str, list[Any]] = {}
        for worker, command in self._given:
            if isinstance(command, kind):
                out.setdefault(worker, []).append(command)
        return out


def _is_free(worker: str, reports: dict[str, Report]) -> bool:
    """Whether it runs nothing, and nobody does on its devices."""
    return not reports[worker].running and _shares_none(worker, reports)


def _shares_none(worker: str, reports: dict[str, Report]) -> bool:
    """Whether nobody else runs requests on its devices."""
    own = set(reports[worker].devices)
    return not any(one.running and own.intersection(one.devices) for name, one in reports.items() if name != worker)


# --- its process ------------------------------------------------------------------------------------------------------


def turn(coordinator: Coordinator, hub: Hub, now: float) -> None:
    """Once around."""
    for worker, message in hub.receive():
        if isinstance(message, Report):
            coordinator.hear(worker, message, now)
    for worker, command in coordinator.decide(now):
        hub.send(worker, command)


def serve(address: str, rules: Rules, is_over: Callable[[], bool] = lambda: False) -> None:
    """Coordinate the workers that connect to an ipc address.

    Raises:
        ConfigError, MailboxError: the address cannot be used.
    """
    coordinator, hub = Coordinator(rules), ZmqHub(address)
    try:
        while not is_over():
            wait([hub], _POLL_S)
            turn(coordinator, hub, time.monotonic())
    finally:
        hub.close()
