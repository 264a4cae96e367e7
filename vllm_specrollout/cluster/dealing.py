"""Dealing of problems by the lengths that their answers had: which engine gets which of them. Pure.

The longest problems come first, each to the engine with the least to do. Siblings of a problem stay together, so their
engine drafts from what they write.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
    """Engines, those with places in order: the one with the fewest tokens first."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self.places = {name: room.places for name, room in rooms.items()}
        # (tokens, order, name)
        self._at = {name: (room.tokens, i, name) for i, (name, room) in enumerate(rooms.items())}
        self._free = sorted(self._at[name] for name, places in self.places.items() if places > 0)

    def engine_for(self, requests: int, home: str | None) -> str | None:
        """The home, as long as it has a place; else the emptiest of those with places for all, or of all."""
        if self.places.get(home or "", 0) > 0:
            return home
        tokens, _, emptiest = self._free[0] if self._free else (1.0, 0, None)
        if home in self.places:
            # only what has nothing to do takes siblings from their home
            return None if tokens else emptiest
        return next((name for _, _, name in self._free if self.places[name] >= requests), emptiest)

    def take(self, name: str, requests: int, tokens: float) -> None:
        own = self._at[name]
        del self._free[bisect_left(self._free, own)]
        self.places[name] -= requests
        self._at[name] = (own[0] + requests * tokens, *own[1:])
        if self.places[name]:
            insort(self._free, self._at[name])
