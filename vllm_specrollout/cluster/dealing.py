"""Dealing of problems by the lengths that their answers had: which engine gets which of them. Pure.

The longest problems come first, each to the engine with the least to do. Siblings of a problem stay together, so their
engine drafts from what they write.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine can take."""

    # requests beyond those that it runs
    places: int
    # tokens that those it runs are expected to generate yet
    tokens: float = 0.0


def deal(
    waiting: Sequence[tuple[str, str]],
    rooms: Mapping[str, Room],
    forecasts: Mapping[str, float],
    homes: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Longest problems first, siblings to one engine, the one that has the fewest tokens to generate.

    Siblings of a full engine wait, or move together to one that has nothing to do.

    Args:
        waiting: (request, problem).
        forecasts: problem -> tokens of an answer. The others count as the median of these.
        homes: problem -> engine that has its siblings.

    Returns:
        request -> engine; those that are missing wait.
    """
    usual = median(forecasts.values()) if forecasts else 1.0
    requests: dict[str, list[str]] = {}
    for request, problem in waiting:
        requests.setdefault(problem, []).append(request)
    line = _Queue(rooms)
    out: dict[str, str] = {}
    for problem in sorted(requests, key=lambda name: -forecasts.get(name, usual)):
        left, home = requests[problem], (homes or {}).get(problem)
        while left:
            home = line.engine_for(len(left), home)
            if home is None:
                break
            taken, left = left[: line.places[home]], left[line.places[home] :]
            line.take(home, len(taken), forecasts.get(problem, usual))
            out |= dict.fromkeys(taken, home)
    return out


class _Queue:
    """Engines, the one with the fewest tokens first."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self.places = {name: room.places for name, room in rooms.items()}
        self._tokens = {name: room.tokens for name, room in rooms.items()}
        self._order = {name: i for i, name in enumerate(rooms)}
        # (tokens, order, name) of those with places; one whose tokens are no longer so counts as gone
        self._heap = [(room.tokens, i, name) for i, (name, room) in enumerate(rooms.items()) if room.places > 0]
        heapq.heapify(self._heap)

    def engine_for(self, requests: int, home: str | None) -> str | None:
        """The home, as long as it has a place; else the emptiest of those with places for all, or of all."""
        if home in self.places:
            if self.places[home]:
                return home
            # only what has nothing to do takes siblings from their home
            emptiest = self._pop()
            if emptiest is not None:
                heapq.heappush(self._heap, emptiest)
            return emptiest[2] if emptiest is not None and not emptiest[0] else None
        too_small, found = [], self._pop()
        while found is not None and self.places[found[2]] < requests:
            too_small.append(found)
            found = self._pop()
        chosen = found or (too_small[0] if too_small else None)
        for entry in [*too_small, *([found] if found else [])]:
            heapq.heappush(self._heap, entry)
        return chosen[2] if chosen else None

    def take(self, name: str, requests: int, tokens: float) -> None:
        self.places[name] -= requests
        self._tokens[name] += requests * tokens
        if self.places[name]:
            heapq.heappush(self._heap, (self._tokens[name], self._order[name], name))

    def _pop(self) -> tuple[float, int, str] | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self.places[entry[2]] and entry[0] == self._tokens[entry[2]]:
                return entry
        return None
