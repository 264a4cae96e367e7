"""Rates of a request's answer by formula: plain, with the engine's own drafts, coupled, and ahead of the target. Pure.

Source: SpecActor, section 4.1. All that is planned is planned by these.

Each drafted token matches the target's with probability p in its turn. A rate is in tokens per millisecond of one
request; all of a batch's requests go at the same one. Ahead of a target that never waits,

- a step gives a request the target's own next token at least, and the first one after a miss gives no more;
- a window is sent when all its w tokens are drafted, and the drafter goes on for one more without an answer;
- a step verifies the rest of one window, and its own token takes the place of the next window's first draft.

Between two misses all goes as foreseen, so steps follow one timetable. Step i of it takes place if all R_i tokens
before it matched. So, by renewal, the rate is 1 / (1 - p) / sum over i of p^(R_i) ms_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Protocol

from vllm_specrollout.errors import ConfigError

MOST = 1.0 - 1e-9
"""Match rates above count as this: the formulas have p = 1 as their limit, not as a value."""
_LEAST = 1e-12  # what is less probable changes no rate
_STEPS = 512  # after these the speed of the second half of them goes on
_ROUNDS = 64
_CLOSE = 1e-9
StepTime = Callable[[int], float]
"""Milliseconds of a step in which this request has so many drafts."""


class Mode(StrEnum):
    """How a request is drafted for."""

    PLAIN = "plain"
    # by what the engine has without a model: history and n-grams
    OWN = "own"
    COUPLED = "coupled"
    DECOUPLED = "decoupled"


class Time(Protocol):
    """What a drafter's or a verifier's step takes, whatever its shape."""

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Milliseconds of a step with so many requests and so many drafts each."""


@dataclass(frozen=True, slots=True)
class AffineTime:
    """fixed + batch * (per request + drafts of each * per row), in milliseconds.

    Of a drafter it is D(b), the time in which each of b requests gets one more drafted token. Of a verifier it is
    V(b, w): a step of b requests, each with its own row and some drafts' rows.

    Raises:
        ConfigError: a term is negative or not finite.
    """

    per_request_ms: float
    fixed_ms: float
    # of a draft's row beside the request's own
    per_row_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_request_ms", "fixed_ms", "per_row_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"`{name}` is {value}, not a time", "give milliseconds, 0 or more")

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Milliseconds of a step with so many requests and so many drafts each."""
        return self.fixed_ms + batch * (self.per_request_ms + drafts * self.per_row_ms)

    def shared_by(self, workers: int) -> AffineTime:
        """The line of so many workers, each with its share of the batch."""
        return replace(self, per_request_ms=self.per_request_ms / workers, per_row_ms=self.per_row_ms / workers)


def plain_rate(verify: Time, batch: int) -> float:
    """One token per step."""
    return 1.0 / verify.ms(batch)


def coupled_tokens(match_rate: float, window: int) -> float:
    """Tokens of a step that verifies a window: (1 - p^(w+1)) / (1 - p)."""
    p = min(match_rate, MOST)
    return (1.0 - p ** (window + 1)) / (1.0 - p)


def coupled_rate(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> float:
    """Draft w tokens, then verify them in w + 1 rows."""
    return coupled_tokens(match_rate, window) / (window * draft.ms(batch) + verify.ms(batch, window))


@dataclass(frozen=True, slots=True)
class Stream:
    """What a request that is drafted for ahead gets from a step, in the mean."""

    tokens: float
    # drafts verified
    drafts: float
    ms: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def decoupled_rate(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> float:
    """Tokens per millisecond of each request, when the verifier never waits."""
    return shared_stream(draft, verify, batch, window, match_rate).rate


def shared_stream(draft: Time, verify: Time, batch: int, window: int, match_rate: float) -> Stream:
    """The stream of each of a batch's requests.

    The others' drafts make a step longer by their mean. That is exact for one request, and for any batch whose windows
    are drafted within a plain step.
    """
    window_ms, others = window * draft.ms(batch), 0.0
    for _ in range(_ROUNDS):
        found = stream(match_rate, window, window_ms, step_time(verify, batch, others))
        if abs(found.drafts - others) < _CLOSE or batch == 1:
            break
        others = found.drafts
    return found


def step_time(verify: Time, batch: int, others: float) -> StepTime:
    """A step's time by one request's drafts, while each of the others has `others` in the mean."""
    beside = (batch - 1) * others
    return lambda drafts: verify.ms(batch, (beside + drafts) / batch)


def stream(match_rate: float, window: int, window_ms: float, step_ms: StepTime) -> Stream:
    """Means over the timetable.

    Args:
        match_rate: p.
        window: w.
        window_ms: what drafting one takes.
    """
    p, plain_ms = min(match_rate, MOST), step_ms(0)
    if window > 1 and window_ms <= plain_ms:
        later = 1.0 / (1.0 - p**window)
        sums = later, later * (window - 1), later * step_ms(window - 1)
    else:
        sums = _later_sums(p, timetable(window, window_ms, step_ms))
    steps = 1.0 + p * sums[0]
    return Stream(1.0 / (1.0 - p) / steps, p * sums[1] / steps, (plain_ms + p * sums[2]) / steps)


def _later_sums(p: float, steps: Iterator[tuple[int, float]]) -> tuple[float, float, float]:
    """Steps, drafts and milliseconds between two misses, from the second step on, given that it takes place."""
    total = [0.0, 0.0, 0.0]
    tail = [0.0, 0.0, 0.0]
    chance = 1.0
    for i, (drafts, ms) in enumerate(islice(steps, 1, _STEPS)):
        for j, value in enumerate((1.0, drafts, ms)):
            total[j] += chance * value
            tail[j] += value if i >= _STEPS // 2 else 0.0
        chance *= p ** (drafts + 1)
        if chance < _LEAST:
            return total[0], total[1], total[2]
    left = chance / (1.0 - p) / (tail[0] + tail[1])
    return total[0] + left * tail[0], total[1] + left * tail[1], total[2] + left * tail[2]


def timetable(window: int, window_ms: float, step_ms: StepTime) -> Iterator[tuple[int, float]]:
    """Drafts and milliseconds of each step from a miss on, as long as every draft matches; without an end."""
    known, now = 0, 0.0
    done = [window_ms]  # when each window is drafted
    answered: list[float] = []  # when each was verified, or overtaken by plain steps
    while True:
        at = known // window
        for i in range(len(done), at + 1):
            done.append(max(done[i - 1], answered[i - 2] if i > 1 else 0.0) + window_ms)
        has_arrived = known > 0 and done[at] <= now + _CLOSE
        drafts = (at + 1) * window - known if has_arrived else 0
        ms = step_ms(drafts)
        yield drafts, ms
        known, now = known + drafts + 1, now + ms
        answered += [now] * (known // window - len(answered))
