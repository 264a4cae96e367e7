"""Guess of when a new epoch begins, from what arrives, for trainers that do not say. Pure: no clock, no files.

An epoch is one pass over the problems. A problem that comes back starts a new one if

- all its requests of this epoch have ended: samples of one group overlap, or at least touch;
- another problem has arrived since its last request did: a group may be admitted one sample after the other;
- the policy has changed since, if the caller gives its version: trainers that send a group's samples far apart (all
  first samples, then all second ones) draw them from one policy, and an epoch without an update would be none.

A request that goes on from an earlier one's answer (it was interrupted for an update, or is the next turn of a
conversation) is no problem that comes back.

Wrong guesses cost speed only, never tokens. A boundary too many makes siblings count as a past epoch's; one too few
(the first problem back still has a request running) is made good by the next problem that comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_specrollout.errors import ConfigError, shown

MAX_EPOCH = 2**31 - 1
"""Highest number of an epoch: the indices keep it in 32 bits."""
MOST_PROBLEMS = 20_480
"""Problems remembered of the running epoch; beyond it the half that came least recently is forgotten, and new then."""
MAX_JUMP = 1_000_000
"""Most epochs that one call may go ahead: what is further is a clock or a mistake, and would drop every answer."""


class EpochError(ConfigError):
    """The epoch named is not one that can begin now."""


def oldest_of(present: int, epochs: int, held: Iterable[int]) -> int:
    """The oldest epoch that drafts: so many before the present one, and of those that hold answers as many. One without
    answers ages nothing, however far ahead a call has named it."""
    return min([present - epochs, *sorted({epoch for epoch in held if epoch < present}, reverse=True)[:epochs]])


def lowest_of(present: int, held: Iterable[int]) -> int:
    """The lowest epoch that may be named: one behind all that hold answers but the present one, so that a call which
    went far ahead is taken back. Where only the present one does, none below it."""
    held = set(held)
    return 1 + max((epoch for epoch in held if epoch < present), default=present - 1 if present in held else -1)


def check_epoch(present: int, asked: int | None, lowest: int | None = None) -> int:
    """The epoch that begins; the present one again where that is named, so that a call may be repeated.

    Args:
        asked: None: the one after `present`.
        lowest: that may be named (`lowest_of`); None: `present`.

    Raises:
        EpochError: it lies before the lowest one, or too far behind the present one.
    """
    epoch = present + 1 if asked is None else asked
    lowest = present if lowest is None else lowest
    if epoch < lowest:
        raise EpochError(
            f"`epoch` is {shown(epoch)}, below the present epoch {present}",
            f"name {lowest} or a later epoch, or none to begin epoch {present + 1}",
        )
    highest = min(present + MAX_JUMP, MAX_EPOCH)
    if epoch > highest:
        raise EpochError(
            f"`epoch` is {shown(epoch)}, and from the present epoch {present} it may be {highest} at most",
            "count epochs from 0 and one by one, or name a fresh `history.dir`",
        )
    return epoch


@dataclass(slots=True)
class _Seen:
    """A problem in the running epoch."""

    running: int
    # the epoch of its last arrival: a straggler of the last epoch has not been seen in this one
    epoch: int
    # arrivals that changed the problem, as counted when this one's last request arrived
    change: int
    weights_version: int | None


class EpochGuess:
    """Watches requests come and go."""

    def __init__(self) -> None:
        # by problem: those that came lately, and those before them, who go all at once
        self._seen: dict[str, _Seen] = {}
        self._before: dict[str, _Seen] = {}
        # running requests' problems, by request
        self._running: dict[str, str] = {}
        self._epoch = 0
        self._changes = 0
        self._last: str | None = None

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def arrived(
        self, problem_id: str, request_id: str, weights_version: int | None = None, continues: bool = False
    ) -> bool:
        """Whether this request begins a new epoch. One that is known to run (it was preempted) never does."""
        if request_id in self._running:
            return False
        if problem_id != self._last:
            self._changes += 1
            self._last = problem_id
        is_new = not continues and self._begins(problem_id, weights_version)
        if is_new:
            self.begin()
        self._running[request_id] = problem_id
        seen = self._seen_of(problem_id) or _Seen(0, 0, 0, None)
        self._before.pop(problem_id, None)
        self._seen[problem_id] = seen
        seen.running += 1
        seen.epoch = self._epoch
        seen.change = self._changes
        seen.weights_version = weights_version
        if 2 * len(self._seen) >= MOST_PROBLEMS:
            self._seen, self._before = _running(self._before), self._seen
        return is_new

    def ended(self, request_id: str) -> None:
        """The request is over, however it ended. Unknown ones are none of ours."""
        problem_id = self._running.pop(request_id, None)
        seen = self._seen_of(problem_id) if problem_id is not None else None
        if seen is not None:
            seen.running -= 1

    def begin(self) -> None:
        """A new epoch: no problem has been seen in it."""
        self._epoch += 1
        self._seen, self._before = _running(self._before) | _running(self._seen), {}

    def _seen_of(self, problem_id: str) -> _Seen | None:
        return self._seen.get(problem_id) or self._before.get(problem_id)

    def _begins(self, problem_id: str, weights_version: int | None) -> bool:
        seen = self._seen_of(problem_id)
        if seen is None or seen.epoch != self._epoch or seen.running or seen.change == self._changes:
            return False
        return weights_version is None or weights_version != seen.weights_version


def _running(seen: dict[str, _Seen]) -> dict[str, _Seen]:
    """Problems whose requests run are never forgotten."""
    return {problem_id: one for problem_id, one in seen.items() if one.running}
