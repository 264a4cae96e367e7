"""Own windows and modes for requests that are accepted less than their batch.

Source: SpecActor, section 4.1, Algorithm 2. What belongs here: who is below by more than chance, and what such a
request is given.

The paper plans an own window as if the request were alone (b = 1). In a batch that still shares its verifier that is
wrong: there a row costs what it adds to everybody's step, and with b = 1 the worst requests would draft most. So the
default asks what a request's choice does to the goodput of the present batch, all tokens per millisecond together. The
printed form is an option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specrollout.decoupled.rates import MOST, Mode, coupled_rate, printed_rate
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.decoupled.timetable import Stream, shared_stream, step_time, stream
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import IntArray

_SURE = 2.0  # standard errors
EVERY = 1000
"""Generated tokens, of all requests together, from one reconfiguration to the next, as in the paper."""
MAX_WINDOW = 16
"""Longest own window."""


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """What one request is given: w_r and m_r."""

    window: int
    # coupled: its drafter waits for the verdict on each window
    mode: Mode


@dataclass(frozen=True, slots=True)
class Group:
    """A verifier with its drafters, as planned: the lines of Algorithm 1's plan, and its window."""

    draft: AffineTime
    verify: AffineTime
    window: int


@dataclass(frozen=True, slots=True)
class MatchCounts:
    """What was drafted for each running request lately, and how much of it the target sampled itself.

    Raises:
        ConfigError: lengths differ, or more tokens match than were tried.
    """

    request_ids: tuple[str, ...]
    # [R] int32, drafted tokens that the target got to: those that matched, and each first one that did not
    tried: IntArray
    # [R] int32
    matched: IntArray

    def __post_init__(self) -> None:
        if not len(self.request_ids) == len(self.tried) == len(self.matched):
            raise ConfigError("counts of matches have different lengths", "give one of each per request")
        if (self.matched < 0).any() or (self.matched > self.tried).any():
            raise ConfigError("more drafted tokens match than were tried", "count matches among tried tokens")

    @property
    def match_rate(self) -> float:
        """Of all requests together; 0.0 before anything was tried."""
        tried = int(self.tried.sum())
        return int(self.matched.sum()) / tried if tried else 0.0


class Reconfigurer:
    """Counts generated tokens, and plans anew when enough were.

    Args:
        every: tokens from one time to the next.
        printed: as in `reconfigure`.
    """

    def __init__(self, *, every: int = EVERY, max_window: int = MAX_WINDOW, printed: bool = False) -> None:
        if every < 1 or max_window < 1:
            raise ConfigError(f"`every` is {every} and `max_window` is {max_window}", "choose 1 or more for both")
        self.every, self.max_window, self.printed = every, max_window, printed
        self._tokens = 0

    def is_due(self, tokens: int) -> bool:
        """Whether `every` tokens were generated since it last was; `tokens` more were now, by all requests."""
        self._tokens += tokens
        if self._tokens < self.every:
            return False
        self._tokens = 0
        return True

    def plan(self, group: Group, counts: MatchCounts) -> dict[str, OwnPlan]:
        """Plans of the requests that are surely below the batch. The others keep the group's window, decoupled."""
        return reconfigure(group, counts, max_window=self.max_window, printed=self.printed)


def reconfigure(
    group: Group, counts: MatchCounts, *, max_window: int = MAX_WINDOW, printed: bool = False
) -> dict[str, OwnPlan]:
    """Algorithm 2.

    A request is below the batch if its m_r matches of n_r trials are fewer than p n_r by more than two standard errors
    of a binomial count, less the usual half for whole numbers: p n_r - m_r - 1/2 > 2 sqrt(n_r p (1 - p)). By chance
    alone half of all requests are below the average, and about one in 44 is so far below.

    Args:
        counts: of all running requests; their number is the present batch.
        printed: plan for b = 1 with the printed tau, as the paper does.
    """
    below = np.flatnonzero(surely_below(counts.tried, counts.matched)).tolist()
    if not below:
        return {}
    found: dict[float, OwnPlan] = {}
    plans = {}
    batch = _Batch(group, len(counts.request_ids), min(counts.match_rate, MOST))
    for i in below:
        name = counts.request_ids[i]
        # twenty levels are as fine as the standard error of 100 trials, and there are no more searches than levels
        p = round(20.0 * int(counts.matched[i]) / int(counts.tried[i])) / 20.0
        if p not in found:
            choices = _printed(group, p, max_window) if printed else _marginal(batch, p, max_window)
            found[p] = max(choices, key=lambda choice: choice[0])[1]
        plans[name] = found[p]
    return plans


def surely_below(tried: npt.NDArray[np.integer], matched: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """[R] whether a request matches less than all together by more than chance; see `reconfigure`.

    Args:
        tried, matched: [R] drafted tokens, and how many of them the target sampled itself.
    """
    mean = int(matched.sum()) / max(int(tried.sum()), 1)
    below: npt.NDArray[np.bool_] = mean * tried - matched - 0.5 > _SURE * np.sqrt(tried * (mean * (1.0 - mean)))
    return below


_Choices = Iterable[tuple[float, OwnPlan]]
"""What each plan is worth, and the plan; of equals the first wins, so what drafts less in vain comes first."""


def _printed(group: Group, p: float, max_window: int) -> _Choices:
    for window in range(1, max_window + 1):
        yield coupled_rate(group.draft, group.verify, 1, window, p), OwnPlan(window, Mode.COUPLED)
    for window in range(1, max_window + 1):
        yield printed_rate(group.draft, group.verify, 1, window, p), OwnPlan(window, Mode.DECOUPLED)


def _marginal(batch: _Batch, p: float, max_window: int) -> _Choices:
    for mode in (Mode.COUPLED, Mode.DECOUPLED):
        for window in range(1, max_window + 1):
            yield batch.goodput(p, window, mode), OwnPlan(window, mode)


@dataclass(slots=True)
class _Batch:
    """The present batch, of which one request is about to leave the common window."""

    group: Group
    size: int
    match_rate: float
    # what each of the others gets from a step as things are
    others: Stream = field(init=False)
    # the same by the share of steps in which the request that leaves is drafted for
    beside: dict[float, Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        group = self.group
        self.others = shared_stream(group.draft, group.verify, self.size, group.window, self.match_rate)

    def goodput(self, p: float, window: int, mode: Mode) -> float:
        """Tokens of all requests per millisecond, if one that matches with p has this window and mode."""
        verify, rest = self.group.verify, self.size - 1
        step_ms = step_time(verify, self.size, self.others.drafts)
        own = stream(p, window, window * self.group.draft.ms(self.size), step_ms, is_ahead=mode is Mode.DECOUPLED)
        if not rest:
            return own.rate
        others = self._others(own.drafting)
        ms = verify.ms(self.size) + verify.per_row_ms * (rest * others.drafts + own.drafts)
        return (rest * others.tokens + own.tokens) / ms

    def _others(self, drafting: float) -> Stream:
        """Where its drafter waits in some of the steps, the others' has a smaller batch in these."""
        if drafting not in self.beside:
            group = self.group
            window_ms = group.window * group.draft.ms(self.size - 1 + drafting)
            step_ms = step_time(group.verify, self.size, self.others.drafts)
            self.beside[drafting] = stream(self.match_rate, group.window, window_ms, step_ms)
        return self.beside[drafting]
