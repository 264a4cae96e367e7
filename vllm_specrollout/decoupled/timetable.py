"""A drafter that streams windows to a verifier that never waits.

What belongs here: what a request gets from each step of such a verifier, and the rate that makes. The protocol:

- Steps follow each other without a pause. Each gives a request the target's own next token at least.
- After a miss the drafter begins anew, and the first step is plain. A window is sent when all w tokens are drafted.
- The drafter goes on for one more window without an answer.
- A step verifies the rest of one window: what has arrived of the window that the text has got to. The target's own
  token at a step's end takes the place of the next window's first draft.

Between two misses all goes as foreseen, so a request's steps follow one timetable from miss to miss. Until a miss there
are 1 / (1 - p) tokens in the mean, the one that replaces it included. Step i of the timetable takes place if all R_i
tokens before it were guessed. So, by renewal,

    rate = 1 / (1 - p) / sum over i of p^(R_i) ms_i

If a window of two tokens or more is drafted within a plain step, the sum is V_0 + p V_(w-1) / (1 - p^w), where V_n is a
step with n drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from vllm_specrollout.config.checks import check_real
from vllm_specrollout.decoupled.rates import MOST, NO_EXITS, Exits
from vllm_specrollout.decoupled.times import Time
from vllm_specrollout.errors import ConfigError

StepTime = Callable[[int], float]
"""Milliseconds of a step in which this request has so many drafts."""
_LEAST = 1e-12  # what is less probable changes no rate
_STEPS = 512  # after these the pace of the second half of them goes on
_ROUNDS = 64
_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Stream:
    """What a request gets from a step, in the mean."""

    tokens: float
    # drafts verified
    drafts: float
    ms: float
    # share of steps in which the drafter drafts for it
    drafting: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def decoupled_rate(
    draft: Time, verify: Time, batch: int, window: int, match_rate: float, exits: Exits = NO_EXITS
) -> float:
    """Tokens per millisecond of each request, when the verifier never waits."""
    return shared_stream(draft, verify, batch, window, match_rate, exits).rate


def shared_stream(
    draft: Time, verify: Time, batch: int, window: int, match_rate: float, exits: Exits = NO_EXITS
) -> Stream:
    """The stream of each of a batch's requests.

    The others' drafts make a step longer by their mean. That is exact for one request, and for any batch whose windows
    are drafted within a plain step.
    """
    window_ms, others = window * draft.ms(batch), 0.0
    for _ in range(_ROUNDS):
        found = stream(match_rate, window, window_ms, step_time(verify, batch, others), exits=exits)
        if abs(found.drafts - others) < _CLOSE or batch == 1:
            break
        others = found.drafts
    return found


def step_time(verify: Time, batch: int, others: float) -> StepTime:
    """A step's time by one request's drafts, while each of the others has `others` in the mean."""
    beside = (batch - 1) * others
    return lambda drafts: verify.ms(batch, (beside + drafts) / batch)


def stream(
    match_rate: float,
    window: int,
    window_ms: float,
    step_ms: StepTime,
    *,
    is_ahead: bool = True,
    exits: Exits = NO_EXITS,
) -> Stream:
    """Means over the timetable.

    Exits are drafted on beside the stream and not verified with it. A miss that is one leaves the request where the
    first step after a miss does if it was guessed: the window behind it was begun a step ago.

    Args:
        match_rate: p.
        window: w.
        window_ms: what drafting one takes, without exits.
        step_ms: see `StepTime`.
        is_ahead: whether the drafter drafts on while a window is verified. If not, it begins anew after each verified
            window, and nothing is drafted in vain beyond that window; then there are no exits.

    Raises:
        ConfigError: a value out of range.
    """
    check_real("match_rate", match_rate, 0, 1)
    p = min(match_rate, MOST)
    if window < 1 or window_ms < 0.0:
        raise ConfigError(f"a window of {window} tokens that takes {window_ms} ms", "draft 1 token or more")
    if not is_ahead:
        return _by_turns(p, window, window_ms, step_ms)
    window_ms *= exits.draft_factor
    saved = exits.probability
    later = _Sums.after_first(p, window, window_ms, step_ms)
    first, again = 1.0 - saved, (1.0 - saved) * p + saved
    steps = first + again * later.steps
    ms = first * step_ms(0) + again * later.ms
    return Stream(1.0 / (1.0 - p) / steps, again * later.drafts / steps, ms / steps, 1.0)


def _by_turns(p: float, window: int, window_ms: float, step_ms: StepTime) -> Stream:
    """Plain steps while a window is drafted, one that verifies what is left of it, and so on."""
    plain_ms = step_ms(0)
    plain = max(1, -int(-window_ms // plain_ms))  # rounded up
    drafts = window - plain
    if drafts < 1:
        return Stream(1.0, 0.0, plain_ms, 1.0)
    before = (1.0 - p**plain) / (1.0 - p)  # plain steps of a turn, in the mean
    reached = p**plain
    steps = before + reached
    tokens = (1.0 - p ** (window + 1)) / (1.0 - p)
    ms = before * plain_ms + reached * step_ms(drafts)
    return Stream(tokens / steps, reached * drafts / steps, ms / steps, before / steps)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Over the steps between two misses, each with the probability that it takes place."""

    steps: float
    drafts: float
    ms: float

    @classmethod
    def after_first(cls, p: float, window: int, window_ms: float, step_ms: StepTime) -> _Sums:
        """From the second step on, given that it takes place."""
        if window > 1 and window_ms <= step_ms(0):
            each = 1.0 / (1.0 - p**window)
            return cls(each, each * (window - 1), each * step_ms(window - 1))
        steps = drafts = ms = 0.0
        chance, paced = 1.0, (0.0, 0, 0)
        for i, (size, took) in enumerate(islice(timetable(window, window_ms, step_ms), 1, _STEPS)):
            steps, drafts, ms = steps + chance, drafts + chance * size, ms + chance * took
            chance *= p ** (size + 1)
            if chance < _LEAST:
                return cls(steps, drafts, ms)
            if i >= _STEPS // 2:
                paced = (paced[0] + took, paced[1] + size, paced[2] + 1)
        tokens = paced[1] + paced[2]
        left = chance / (1.0 - p) / tokens
        return cls(steps + left * paced[2], drafts + left * paced[1], ms + left * paced[0])


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
