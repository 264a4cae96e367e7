"""When drafting is switched off and on, what asking drafters costs, and which steps go without to learn. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MARGIN_ON = 0.05
"""Share of a plain step that drafts must be expected to save before they are switched on again."""
PLAIN_PROBE = "plain, to know its cost"
"""The reason of a step without drafts that is to be measured."""
STAY = 0.03
"""Share of a plain step that drafts must be expected to save; less is within what is not known: none is verified."""
_PATIENCE = 16  # steps whose sum decides whether drafts pay, and that they are on for at the least
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64  # steps without asking drafters; each further one is twice as long
_FIRST_PLAIN, _LAST_PLAIN = 16, 64  # steps with drafts after which one goes without, at first and later
_SURE = 0.5  # share of a plain step that drafts save from which on it does not matter what exactly that costs
_ASK_MEMORY = 0.9  # weight left to what asking has cost after each further step


@dataclass(slots=True)
class Asking:
    """What it costs to ask drafters and to choose among what they propose, whatever is verified of it."""

    # milliseconds per request
    ms: float = 0.0
    seen: int = 0

    def observe(self, batch: int, ask_ms: float) -> None:
        """A step of so many requests spent so much on it."""
        if ask_ms <= 0.0 or batch <= 0:
            return
        self.seen += 1
        self.ms += max(1.0 - _ASK_MEMORY, 1.0 / self.seen) * (ask_ms / batch - self.ms)

    def predict(self, batch: int) -> float:
        """Milliseconds for so many requests; 0.0 before any was measured."""
        return self.ms * batch


@dataclass(slots=True)
class Switch:
    """Whether drafters are asked at all. Slow on purpose: a single step decides nothing."""

    is_on: bool = True
    # what the last steps were expected to save, of those since it was switched on in which something was proposed
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=_PATIENCE))
    pause: int = _FIRST_PAUSE
    # steps until the next try
    left: int = 0

    @property
    def is_resting(self) -> bool:
        """Whether the next step belongs to a pause, so that `asks` will say no."""
        return not self.is_on and self.left > 0

    @property
    def rest_left(self) -> int:
        """How many of the coming steps belong to a pause."""
        return 0 if self.is_on else max(self.left, 0)

    def asks(self) -> bool:
        """Called once per step of the engine, whether or not anything could be drafted in it."""
        if self.is_on:
            return True
        self.left -= 1
        return self.left < 0

    def judge(self, share: float) -> None:
        """share: what asking drafters and verifying was expected to save, of a plain step; less than 0: to cost."""
        if not self.is_on:
            if share > MARGIN_ON:
                self.is_on, self.pause = True, _FIRST_PAUSE
                self.shares.clear()
                return
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
            self.left = self.pause
            return
        self.shares.append(share)
        if len(self.shares) == _PATIENCE and sum(self.shares) <= 0.0:
            self.is_on, self.left = False, self.pause


@dataclass(slots=True)
class PlainSteps:
    """When a step goes without drafts for the sake of its time, which drafted steps alone leave to guessing."""

    every: int = _FIRST_PLAIN
    # steps with drafts since the last one without
    drafted: int = 0

    def is_due(self, nodes: int, share: float) -> bool:
        """Called once per step with what would be drafted, and which share of a plain step that is said to save."""
        if not nodes:
            self.drafted = 0
            return False
        self.drafted += 1
        if self.drafted <= self.every or share > _SURE:
            return False
        self.drafted, self.every = 0, min(2 * self.every, _LAST_PLAIN)
        return True
