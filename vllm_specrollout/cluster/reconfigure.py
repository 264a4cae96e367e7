"""Own windows and modes for requests that are accepted less than their batch, again and again as an engine runs. Pure.

Source: SpecActor, section 4.1, Algorithm 2. The drafter hears of a plan in each request's next verdict (link.py).

The paper plans an own window as if the request were alone (b = 1). In a batch that still shares its verifier that is
wrong: there a row costs what it adds to everybody's step, and with b = 1 the worst requests would draft most. So the
default asks what a request's choice does to the goodput of the present batch, all tokens per millisecond together. The
printed form is an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from vllm_specrollout.cluster.link import Link, MatchCounts, OwnPlan
from vllm_specrollout.cluster.profiles import Elsewhere, Learning
from vllm_specrollout.cluster.rates import (
    MOST,
    AffineTime,
    Mode,
    coupled_rate,
    printed_rate,
    shared_stream,
    step_time,
    stream,
)
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord

EVERY = 1000
"""Generated tokens, of all requests together, from one reconfiguration to the next, as in the paper."""
MAX_WINDOW = 16
"""Longest own window."""
_SURE = 2.0  # standard errors


@dataclass(frozen=True, slots=True)
class Group:
    """A verifier with its drafter: what they take, and the window of those without a plan."""

    draft: AffineTime
    verify: AffineTime
    window: int


def reconfigure(group: Group, counts: MatchCounts, *, printed: bool = False) -> dict[str, OwnPlan]:
    """Algorithm 2: plans of the requests that are surely below the batch.

    Args:
        counts: of all running requests; their number is the present batch.
        printed: plan for b = 1 with the printed tau, as the paper does.
    """
    found: dict[float, OwnPlan] = {}
    plans = {}
    for i in np.flatnonzero(surely_below(counts.tried, counts.matched)).tolist():
        # twenty levels are as fine as the standard error of 100 trials, and there are no more searches than levels
        p = round(20.0 * int(counts.matched[i]) / int(counts.tried[i])) / 20.0
        if p not in found:
            worth = _printed(group, p) if printed else _goodput(group, counts, p)
            # of equals the first: what drafts less in vain comes first
            choices = product((Mode.COUPLED, Mode.DECOUPLED), range(1, MAX_WINDOW + 1))
            found[p] = max((OwnPlan(window, mode) for mode, window in choices), key=worth)
        plans[counts.request_ids[i]] = found[p]
    return plans


def surely_below(tried: npt.NDArray[np.integer], matched: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """[R] whether a request matches less than all together by more than chance.

    m matches of n trials are fewer than p n by more than two standard errors of a binomial count, less the usual half
    for whole numbers: p n - m - 1/2 > 2 sqrt(n p (1 - p)). By chance alone half of all requests are below the average,
    and about one in 44 is so far below.

    Args:
        tried, matched: [R] drafted tokens, and how many of them the target sampled itself.
    """
    mean = int(matched.sum()) / max(int(tried.sum()), 1)
    below: npt.NDArray[np.bool_] = mean * tried - matched - 0.5 > _SURE * np.sqrt(tried * (mean * (1.0 - mean)))
    return below


def _printed(group: Group, p: float) -> Callable[[OwnPlan], float]:
    def worth(own: OwnPlan) -> float:
        rate = coupled_rate if own.mode is Mode.COUPLED else printed_rate
        return rate(group.draft, group.verify, 1, own.window, p)

    return worth


def _goodput(group: Group, counts: MatchCounts, p: float) -> Callable[[OwnPlan], float]:
    """Tokens of all requests per millisecond, if one that matches with p has a plan of its own."""
    verify, batch = group.verify, len(counts.request_ids)
    mean = int(counts.matched.sum()) / max(int(counts.tried.sum()), 1)
    # what each of the others gets from a step as things are
    others = shared_stream(group.draft, verify, batch, group.window, min(mean, MOST))
    step_ms = step_time(verify, batch, others.drafts)

    def worth(own: OwnPlan) -> float:
        window_ms = own.window * group.draft.ms(batch)
        mine = stream(p, own.window, window_ms, step_ms, is_ahead=own.mode is Mode.DECOUPLED)
        ms = verify.ms(batch) + verify.per_row_ms * ((batch - 1) * others.drafts + mine.drafts)
        return ((batch - 1) * others.tokens + mine.tokens) / ms

    return worth


class Replanning(Listener):
    """Gives requests their own plans, as an engine's steps go by.

    Each drafter has a D of its own, and its own matches. Nothing is planned for one before its first beat with work in
    it, nor before the first step.

    Args:
        learning: of what steps and passes take.
        every: tokens from one time to the next.
        printed: as in `reconfigure`.
    """

    def __init__(self, elsewhere: Elsewhere, learning: Learning, *, every: int = EVERY, printed: bool = False) -> None:
        self.every = every
        self.is_off = False
        self._elsewhere, self._printed = elsewhere, printed
        self._learning = learning
        # generated since plans were made
        self._tokens = 0

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None or self.is_off or self._elsewhere.is_resting:
            return
        self._tokens += timing.tokens
        if self._tokens >= self.every:
            self._tokens = 0
            for link in self._elsewhere.links.values():
                link.plans = self._plans(link)

    def turn(self, is_on: bool) -> None:
        """Whether plans are made from now on; without them all requests have the window of their drafter."""
        self.is_off = not is_on
        if self.is_off:
            for link in self._elsewhere.links.values():
                link.plans = {}

    def _plans(self, link: Link) -> Mapping[str, OwnPlan]:
        lines = self._learning.lines(link)
        return {} if lines is None else self.plan(Group(*lines, link.window), link.match_counts())

    def plan(self, group: Group, counts: MatchCounts) -> Mapping[str, OwnPlan]:
        """What the requests of one drafter are given."""
        return reconfigure(group, counts, printed=self._printed)
