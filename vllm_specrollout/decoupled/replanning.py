"""Algorithm 2 on the requests of a running engine: who gets a window and a mode of its own, again and again. Pure.

Source: SpecActor, section 4.1. What belongs here: what is known of V and D by now, and when plans are made. What a plan
is worth is said by reconfigure.py, and the drafter hears of it in each request's next verdict (following.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Protocol

from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.decoupled.link import Link
from vllm_specrollout.decoupled.messages import Beat
from vllm_specrollout.decoupled.reconfigure import Group, OwnPlan, Reconfigurer
from vllm_specrollout.decoupled.times import AffineTime
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord, StepTiming

_BEATS = 64  # of the last ones D is learned
_STEPS = 64  # of the last ones the mean number of drafts is taken


class Elsewhere(Protocol):
    """The drafters of an engine; `drafters.decoupled.DecoupledDrafter` is one."""

    links: dict[str, Link]
    is_resting: bool


class Replanning(Listener):
    """Gives requests their own plans, as an engine's steps go by.

    Each drafter has a D of its own, and its own matches. Nothing is planned for one before its first beat with work in
    it, nor before the first step.
    """

    def __init__(self, elsewhere: Elsewhere, reconfigurer: Reconfigurer) -> None:
        self.reconfigurer = reconfigurer
        self.is_off = False
        self._elsewhere = elsewhere
        self._cost = StepCost()
        # requests and draft nodes of each of the last steps
        self._last: deque[tuple[int, int]] = deque(maxlen=_STEPS)

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        if timing is None or self.is_off or self._elsewhere.is_resting:
            return
        if timing.is_decode_only:
            self._cost.observe(timing)
            self._last.append((timing.batch, timing.nodes))
        if self.reconfigurer.is_due(timing.tokens):
            self.renew()

    def turn(self, is_on: bool) -> None:
        """Whether plans are made from now on; without them all requests have the window of their drafter."""
        self.is_off = not is_on
        if self.is_off:
            for link in self._elsewhere.links.values():
                link.requests.plans = {}

    def renew(self) -> None:
        """Plan anew for the requests of all drafters."""
        for link in self._elsewhere.links.values():
            link.requests.plans = self._plans(link)

    def _plans(self, link: Link) -> Mapping[str, OwnPlan]:
        counts, draft = link.requests.match_counts(), draft_line(link.beats)
        if draft is None or not self._cost.is_known:
            return {}
        steps = sum(batch for batch, _ in self._last)
        drafts = sum(nodes for _, nodes in self._last) / steps if steps else 0.0
        verify = line_at(self._cost, len(counts.request_ids), drafts)
        return self.reconfigurer.plan(Group(draft, verify, link.requests.window), counts)


def draft_line(beats: deque[Beat]) -> AffineTime | None:
    """D(b) by what a drafter's process did lately; None: it did nothing yet.

    A pass gives each of its streams one more level. The nodes that it looks at above that level are in the line's term
    per request, as many as there were.
    """
    cost, streams, rows, passes = StepCost(), 0, 0, 0
    for beat in islice(beats, max(len(beats) - _BEATS, 0), None):
        if beat.passes and beat.streams and beat.busy_ms > 0.0:
            batch, nodes = round(beat.streams / beat.passes), round(beat.rows / beat.passes)
            cost.observe(_pass(batch, nodes, beat.busy_ms / beat.passes))
            passes, streams, rows = passes + beat.passes, streams + beat.streams, rows + beat.rows
    if not passes:
        return None
    above = rows / streams
    line = line_at(cost, round(streams / passes), above)
    return AffineTime(line.per_request_ms + above * line.per_row_ms, line.fixed_ms)


def line_at(cost: StepCost, batch: int, drafts: float) -> AffineTime:
    """The line through what is learned of steps of 1 request and of `batch`, without drafts and with so many each."""
    batch, nodes = max(batch, 1), round(max(batch, 1) * drafts)
    one, all_ms = cost.plain_ms(1), cost.plain_ms(batch)
    per_request = min((all_ms - one) / (batch - 1), one) if batch > 1 else 0.0
    per_row = (cost.predict(batch, nodes) - all_ms) / nodes if nodes else 0.0
    return AffineTime(per_request, one - per_request, per_row)


def _pass(batch: int, nodes: int, ms: float) -> StepTiming:
    return StepTiming(max(batch, 1), max(batch, 1) + nodes, nodes, 0, 0, ms, True)
