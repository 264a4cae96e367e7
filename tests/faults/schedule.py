"""Schedules of faults, drawn from a seed. What belongs here: which things happen, how often, and in what order.

A schedule knows no engine. It is a list of acts, each with a number of its own to draw its details from, so that an act
that is left out changes none of the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ACTS = {
    "ask": 6,
    "step": 26,
    "abort": 4,
    "break a drafter": 5,
    "mend": 2,
    "recover": 2,
    "reload": 1,
    "push": 2,
    "push in pieces": 1,
    "write in place": 1,
    "empty sign": 1,
    "sleep 1": 1,
    "sleep 2": 1,
    "pause": 1,
    "reset": 1,
    "epoch": 1,
    "reward": 2,
    "disk full": 1,
}
"""What may happen between two steps, and how often in relation to each other."""


@dataclass(frozen=True)
class Act:
    what: str
    draw: int

    def chance(self) -> random.Random:
        """What the act's details are drawn from."""
        return random.Random(self.draw)


@dataclass(frozen=True)
class Schedule:
    seed: int
    acts: tuple[Act, ...]

    @classmethod
    def of(cls, seed: int, most: int = 32) -> Schedule:
        """Args:
        most: acts at most.
        """
        chance = random.Random(f"schedule {seed}")
        names = list(ACTS)
        # some schedules are mostly of one kind
        weights = [ACTS[name] * chance.choice((1, 1, 1, 3)) for name in names]
        found = chance.choices(names, weights, k=chance.randrange(most // 2, most))
        acts = [Act(name, chance.getrandbits(32)) for name in ("ask", *found)]
        return cls(seed, tuple(acts))

    def chance(self, what: str) -> random.Random:
        """What one part of the schedule's setting is drawn from."""
        return random.Random(f"{what} {self.seed}")
