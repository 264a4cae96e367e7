"""Own windows and modes for requests that are accepted less than their batch, again and again as an engine runs. Pure.

Source: SpecActor, section 4.1, Algorithm 2. The drafter hears of a plan in each request's next verdict (link.py).

The paper plans an own window as if the request were alone (b = 1). In a batch that still shares its verifier that is
wrong: there a row costs what it adds to everybody's step, and with b = 1 the worst requests would draft most. So the
default asks what a request's choice does to the goodput of the present batch, all tokens per millisecond together. The
printed form is an option.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.cluster.link import Beat, Link, MatchCounts, OwnPlan
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
from vllm_specrollout.types import StepRecord, StepTiming

EVERY = 1000
"""Generated tokens, of all requests together, from one reconfiguration to the next, as in the paper."""
MAX_WINDOW = 16
"""Longest own window."""
_SURE = 2.0  # standard errors
_BEATS = 64  # of the last ones D is learned
_STEPS = 64  # of the last ones the mean number of drafts is taken


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


class Elsewhere(Protocol):
    """The drafters of an engine; `drafters.decoupled.DecoupledDrafter` is one."""

    links: dict[str, Link]
    is_resting: bool


class Replanning(Listener):
    """Gives requests their own plans, as an engine's steps go by.

    Each drafter has a D of its own, and its own matches. Nothing is planned for one before its first beat with work in
    it, nor before the first step.

    Args:
        every: tokens from one time to the next.
        printed: as in `reconfigure`.
    """

    def __init__(self, elsewhere: Elsewhere, *, every: int = EVERY, printed: bool = False) -> None:
        self.every = every
        self.is_off = False
        self._elsewhere, self._printed = elsewhere, printed
        self._cost = StepCost()
        # generated since plans were made
        self._tokens = 0
        # requests and draft nodes of each of the last steps
        self._last: deque[tuple[int, int]] = deque(maxlen=_STEPS)

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None or self.is_off or self._elsewhere.is_resting:
            return
        if timing.is_decode_only:
            self._cost.observe(timing)
            self._last.append((timing.batch, timing.nodes))
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
        counts, draft = link.match_counts(), draft_line(link.beats)
        if draft is None or not self._cost.is_known:
            return {}
        steps = sum(batch for batch, _ in self._last)
        drafts = sum(nodes for _, nodes in self._last) / steps if steps else 0.0
        return self.plan(Group(draft, line_at(self._cost, len(counts.request_ids), drafts), link.window), counts)

    def plan(self, group: Group, counts: MatchCounts) -> Mapping[str, OwnPlan]:
        """What the requests of one drafter are given."""
        return reconfigure(group, counts, printed=self._printed)


def draft_line(beats: deque[Beat]) -> AffineTime | None:
    """D(b) by what a drafter's process did lately; None: it did nothing yet. A pass gives each line one more level."""
    cost, streams, passes = StepCost(), 0, 0
    for beat in islice(beats, max(len(beats) - _BEATS, 0), None):
        if beat.passes and beat.streams and beat.busy_ms > 0.0:
            batch = max(round(beat.streams / beat.passes), 1)
            cost.observe(StepTiming(batch, batch, 0, 0, 0, beat.busy_ms / beat.passes, True))
            passes, streams = passes + beat.passes, streams + beat.streams
    return line_at(cost, round(streams / passes), 0.0) if passes else None


def line_at(cost: StepCost, batch: int, drafts: float) -> AffineTime:
    """The line through what is learned of steps of 1 request and of `batch`, without drafts and with so many each."""
    batch, nodes = max(batch, 1), round(max(batch, 1) * drafts)
    one, all_ms = cost.plain_ms(1), cost.plain_ms(batch)
    per_request = min((all_ms - one) / (batch - 1), one) if batch > 1 else 0.0
    per_row = (cost.predict(batch, nodes) - all_ms) / nodes if nodes else 0.0
    return AffineTime(per_request, one - per_request, per_row)
