"""The spot trainer's decisions: when idle engines prefill, when the trainer beside one trains, and what it publishes.

Pure: what was heard goes in, what is to be done comes out, so traces can be replayed on it (TLT 4.2). Users come first:
an engine that works, or whose drafter others have, is left alone. A trainer on cores of its own disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

FALLS, ERRORS = 0.97, 3.0
"""Of the match rate at the last publication: below, and by so many standard errors, the head is to learn."""
BETTER = 1.01
"""Of what the head that serves is worth by the trainer's own judgement: from there on, another one is published."""
IDLE_JUDGEMENTS = 2
"""So many in a row that bring nothing end the learning."""
ENOUGH = 4096
"""Positions by which a match rate is told. A new head's probation is over by then."""
WORTH = 1.8 / 6
"""Accepted tokens per level from which on a head is worth its passes."""


class Doing(Enum):
    """What an engine does."""

    BUSY = "busy"
    IDLE = "idle"
    DRAFTING = "drafting"
    """Its drafter is lent to another one."""
    TRAINING = "training"
    """The trainer has its device."""


@dataclass(frozen=True, slots=True)
class MatchRate:
    """Of the head that serves, by the positions where the target told whether a draft was met."""

    positions: int = 0
    met: int = 0

    @property
    def is_known(self) -> bool:
        return self.positions >= ENOUGH

    @property
    def share(self) -> float:
        return self.met / max(self.positions, 1)

    def has_fallen(self, then: MatchRate) -> bool:
        error = sum(one.share * (1.0 - one.share) / max(one.positions, 1) for one in (self, then)) ** 0.5
        return then.is_known and self.is_known and self.share < min(FALLS * then.share, then.share - ERRORS * error)


class MatchRates:
    """Those of one engine, by counts that only grow."""

    def __init__(self) -> None:
        # counts as they were heard, from the window's begin on; and those at the last publication
        self._heard = [MatchRate()]
        self._begin = MatchRate()
        self.then, self.now = MatchRate(), MatchRate()
        """Of the first positions since then, and of the last ones."""

    def hear(self, positions: int, met: int) -> None:
        self._heard.append(MatchRate(positions, met))
        while positions - self._heard[1].positions >= ENOUGH:
            self._heard.pop(0)
        self.now = _between(self._heard[0], self._heard[-1])
        if not self.then.is_known:
            self.then = _between(self._begin, self._heard[-1])

    def begin_anew(self) -> None:
        """Another head serves, or learning has ended and this one is as good as it gets."""
        self._begin = self._heard[-1]
        self._heard, self.then, self.now = [self._begin], MatchRate(), MatchRate()


def _between(one: MatchRate, other: MatchRate) -> MatchRate:
    return MatchRate(other.positions - one.positions, other.met - one.met)


@dataclass(frozen=True, slots=True)
class HeardEngine:
    """An engine, as it was heard last."""

    doing: Doing
    # the clock's seconds since which it does so
    since: float
    # answers may be there that were not computed once more
    has_answers: bool = False
    # seconds of its last turn of prefill
    turn_s: float = 0.0
    # an untrained head is no head
    has_head: bool = True
    # as `MatchRates`
    rate_then: MatchRate = MatchRate()
    rate_now: MatchRate = MatchRate()
    # times that it went back to the head before
    went_back: int = 0


@dataclass(frozen=True, slots=True)
class HeardTrainer:
    """The trainer, as it told last; by itself it ends learning after `IDLE_JUDGEMENTS`."""

    is_learning: bool = False
    is_halted: bool = True
    # it has room for rows
    wants_rows: bool = False
    # seconds of its last step
    step_s: float = 0.0
    # accepted tokens per draft on answers held out: of the best head since the last publication, and of what serves
    own: float = 0.0
    serving: float = 0.0
    # tokens of a draft
    levels: int = 1
    # it writes a head
    is_publishing: bool = False
    # times that it was told of an engine that went back
    backs: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """All that is decided by."""

    now: float
    engines: tuple[HeardEngine, ...]
    trainer: HeardTrainer
    # index of the engine that the trainer is beside; None: another process decides for it
    leader: int | None = 0
    # the trainer has cores or a GPU of its own
    has_own: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """An engine computes answers once more."""

    engine: int


@dataclass(frozen=True, slots=True)
class Train:
    """The trainer goes on, or begins."""


@dataclass(frozen=True, slots=True)
class Halt:
    """The trainer stops within an optimiser step."""


@dataclass(frozen=True, slots=True)
class Publish:
    """The trainer writes its best head, and the engines load it."""


@dataclass(frozen=True, slots=True)
class Back:
    """The trainer drops what an engine has found worse, and ends learning."""


Action = Prefill | Train | Halt | Publish | Back


def decide(heard: Heard) -> list[Action]:
    """What is to be done now; nothing that is under way is named again."""
    return [*_turns(heard), *_trainings(heard)]


def needs_learning(engine: HeardEngine) -> bool:
    """Whether it has no head, or one that is met less often than it was."""
    return not engine.has_head or engine.rate_now.has_fallen(engine.rate_then)


def _turns(heard: Heard) -> Iterator[Prefill]:
    """Each engine that has nothing to do, while the trainer beside it does not train."""
    if heard.trainer.is_learning and heard.trainer.wants_rows:
        yield from (Prefill(i) for i, one in enumerate(heard.engines) if one.doing is Doing.IDLE and one.has_answers)


def _trainings(heard: Heard) -> Iterator[Action]:
    if heard.leader is None:
        return
    trainer, engine = heard.trainer, heard.engines[heard.leader]
    if engine.went_back > trainer.backs:
        yield Back()
    elif _is_better(engine, trainer):
        yield Publish()
    if trainer.is_halted:
        if (trainer.is_learning or needs_learning(engine)) and _is_free(heard, engine):
            yield Train()
    elif not _is_free(heard, engine):
        yield Halt()


def _is_free(heard: Heard, engine: HeardEngine) -> bool:
    """Whether the trainer may train: an engine's own rows come before it."""
    if heard.has_own:
        return True
    trainer = heard.trainer
    if engine.has_answers and trainer.is_learning and trainer.wants_rows:
        return False
    idle_s = heard.now - engine.since
    return engine.doing is Doing.TRAINING or (engine.doing is Doing.IDLE and idle_s > engine.turn_s + trainer.step_s)


def _is_better(engine: HeardEngine, trainer: HeardTrainer) -> bool:
    """Whether the trainer has a head that is better than the one that serves, and that one's probation is over."""
    if trainer.is_publishing:
        return False
    if not engine.has_head:
        return trainer.own >= WORTH * trainer.levels
    return engine.rate_then.is_known and trainer.own >= BETTER * trainer.serving > 0.0
