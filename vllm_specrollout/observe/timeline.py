"""A timeline of each request, from the records of its steps: what was decided for it, when and why.

What belongs here: which requests are kept, which steps each of them went through, and why each got its draft or none.
Nobody looks at a request while drafting is paused, and the engine does nothing for us: such steps are counted by the
tokens that they yielded, one each, when the request is next seen or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.observe.steps import OpenPlans, verified_by_request, why
from vllm_specrollout.types import (
    BoolArray,
    DraftLimits,
    FinishedRequest,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    TreeBatch,
)

MOST_SEGMENTS = 128
"""Of one request; beyond that, neighbours are joined two by two, and the story gets coarser."""
MOST_RUNNING = 4096
"""Requests without an end that are remembered."""
UNASKED = "not asked"
"""The reason of a step in which nobody looked at the request; behind it, why, where that is known."""


@dataclass(slots=True)
class Segment:
    """Steps of one request in a row; sums over them."""

    # tokens of the answer when it began, and when it was over
    first: int
    end: int
    # seconds
    begin_s: float
    end_s: float
    # why -> steps
    reasons: dict[str, int]
    # draft nodes verified for this request, and accepted
    nodes: int = 0
    accepted: int = 0
    # accepted nodes that the budget expected; 0.0 where it has no expectation
    expected: float = 0.0
    # steps whose time the budget expected, and the milliseconds: with all their drafts, and without any
    foretold: int = 0
    expected_ms: float = 0.0
    plain_ms: float = 0.0
    # running requests that could be drafted for
    batch: int = 0

    @property
    def steps(self) -> int:
        return sum(self.reasons.values())

    def merge(self, later: Segment) -> None:
        """Go on to the end of the segment that follows."""
        self.end, self.end_s = later.end, later.end_s
        for reason, steps in later.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + steps
        self.nodes += later.nodes
        self.accepted += later.accepted
        self.expected += later.expected
        self.foretold += later.foretold
        self.expected_ms += later.expected_ms
        self.plain_ms += later.plain_ms
        self.batch += later.batch


class Timeline:
    """Segments of like steps by request: of all that run, and of the last `keep` that ended."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        # request id -> (the name its client knows, segments); the one that came or ended first stands first
        self._running: dict[str, tuple[str, list[Segment]]] = {}
        self._ended: dict[str, tuple[str, list[Segment]]] = {}

    def add(self, request_id: str, name: str, step: Segment) -> None:
        """One step (or several alike) of a request; where it is like the one before, it joins that one's segment."""
        if request_id not in self._running:
            if len(self._running) >= MOST_RUNNING:
                del self._running[next(iter(self._running))]
            self._running[request_id] = (name, [])
        segments = self._running[request_id][1]
        if segments and segments[-1].reasons.keys() == step.reasons.keys():
            segments[-1].merge(step)
            return
        if len(segments) >= MOST_SEGMENTS:
            for i in range(0, len(segments) - 1, 2):
                segments[i].merge(segments[i + 1])
            del segments[1::2]
        segments.append(step)

    def end(self, request_id: str, num_tokens: int) -> None:
        """The answer is over, and so many tokens long; what was sampled behind its end is none of it."""
        entry = self._running.pop(request_id, None)
        if entry is None:
            return
        for segment in entry[1]:
            segment.end = min(segment.end, num_tokens)
        self._ended[request_id] = entry
        if len(self._ended) > self.keep:
            del self._ended[next(iter(self._ended))]

    def segments(self) -> list[tuple[str, list[Segment]]]:
        """(name of a request, its segments in order), of all that are kept."""
        return [*self._ended.values(), *self._running.values()]


@dataclass(slots=True)
class _Open:
    """A running request: what of it is told already, and the step behind that."""

    name: str
    # tokens of the answer up to which all is told, and when that was, in seconds
    first: int
    begin_s: float
    # the recorded step that begins there; its end is known when the request is next seen. None: there is none
    step: Segment | None = None
    # steps behind that one in which nobody was asked
    unasked: int = 0


@dataclass(frozen=True, slots=True)
class _End:
    """A request that is over, while records of its last steps may still come."""

    num_tokens: int
    end_s: float
    # plans that were made before it ended
    num_plans: int


@dataclass(frozen=True, slots=True)
class _Note:
    """What a record does not say of its step."""

    # seconds
    begin_s: float
    limits: DraftLimits


class TimelineListener(Listener):
    """Writes down what was decided for each request. Times count from the end of the first step."""

    def __init__(self, keep: int, clock: Callable[[], float]) -> None:
        """Args:
        keep: of requests that ended, so many are remembered.
        clock: seconds, from any zero.
        """
        self._timeline = Timeline(keep)
        self._clock = clock
        self._zero: float | None = None
        # when the last record came
        self._stepped_s = 0.0
        self._num_requests = 0
        self._unasked = UNASKED
        self._plans: OpenPlans[_Note] = OpenPlans()
        self._open: dict[str, _Open] = {}
        self._ends: dict[str, _End] = {}

    def admitted(self, view: RequestView) -> None:
        if view.request_id not in self._open:
            self._open[view.request_id] = _Open(view.name or view.request_id, _position(view), self._now())

    def planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        draft_ms: float,
    ) -> None:
        begin_s = self._now(draft_ms)
        self._num_requests = batch.size
        for view in batch.views:
            if view.request_id not in self._open:
                self._open[view.request_id] = _Open(view.name or view.request_id, _position(view), begin_s)
        self._plans.add(plan, _Note(begin_s, limits))

    def paused(self, num_requests: int, reason: str) -> None:
        self._num_requests = num_requests
        self._unasked = f"{UNASKED}: {reason}"

    def stepped(self, record: StepRecord) -> None:
        self._stepped_s = self._now()
        note = self._plans.take(record.plan)
        # a plan without a note was made before anybody listened
        if record.plan is not None and record.batch is not None and note is not None:
            steps = _steps_of(record, record.plan, record.batch, note)
            for view, step in zip(record.batch.views, steps, strict=True):
                one = self._open.get(view.request_id)
                if one is not None:  # else it is over and not kept
                    self._tell(view.request_id, one, step.first, step.begin_s)
                    one.step = step
        elif record.plan is None:
            for request_id in record.trees.request_ids:
                if request_id in self._open:
                    self._open[request_id].unasked += 1
        self._tell_ends()

    def finished(self, ending: FinishedRequest) -> None:
        if ending.request_id in self._open:
            self._ends[ending.request_id] = _End(len(ending.token_ids), self._now(), self._plans.num_added)
            self._tell_ends()

    def segments(self) -> list[tuple[str, list[Segment]]]:
        """(name of a request, its segments in order), with steps that are over although nothing came to say so."""
        self._plans.take_all()
        self._tell_ends()
        for request_id, one in self._open.items():
            drafted = 0 if one.step is None else one.step.accepted + 1
            self._tell(request_id, one, one.first + drafted + one.unasked, self._stepped_s)
        return self._timeline.segments()

    def rows(self) -> list[dict[str, Any]]:
        """`segments` as plain values: per request `name` and `stretches`, whose fields are those of `Segment`."""
        return [{"name": name, "stretches": [asdict(one) for one in own]} for name, own in self.segments()]

    def _now(self, ago_ms: float = 0.0) -> float:
        now = self._clock() - ago_ms / 1e3
        if self._zero is None:
            self._zero = now
        return now - self._zero

    def _tell(self, request_id: str, one: _Open, end: int, end_s: float) -> None:
        """The request has come to so many tokens. Where it has no more than before, its last step never ran."""
        step, grown = one.step, end - one.first
        if grown > 0:
            own = 0 if step is None else min(step.accepted + 1, grown)
            rest = grown - own
            # each unasked step is taken to last as long as the recorded one before them
            middle_s = one.begin_s + (end_s - one.begin_s) * (own > 0) / ((own > 0) + rest)
            if step is not None:
                step.end, step.end_s = step.first + own, middle_s
                self._timeline.add(request_id, one.name, step)
            if rest:
                batch = rest * self._num_requests
                unasked = Segment(end - rest, end, middle_s, end_s, {self._unasked: rest}, batch=batch)
                self._timeline.add(request_id, one.name, unasked)
            one.first = end
        one.begin_s, one.step, one.unasked = end_s, None, 0

    def _tell_ends(self) -> None:
        """Requests that are over, and of which no record can come any more, or which are not kept anyhow."""
        for request_id, end in list(self._ends.items()):
            if self._plans.num_gone >= end.num_plans or len(self._ends) > self._timeline.keep:
                del self._ends[request_id]
                self._tell(request_id, self._open.pop(request_id), end.num_tokens, end.end_s)
                self._timeline.end(request_id, end.num_tokens)


def summarise(segments: Sequence[Segment], most: int) -> list[Segment]:
    """At most so many segments of the same steps: neighbours that are most alike in their reasons are joined first.

    Joining costs the squared distance of both mixes of reasons, weighed by their steps (Ward, "Hierarchical grouping to
    optimize an objective function", 1963). So steps that alternate are joined, and a long phase of its own stays.
    """
    kept = [replace(segment, reasons=dict(segment.reasons)) for segment in segments]
    while len(kept) > max(most, 1):
        i = min(range(len(kept) - 1), key=lambda i: _loss(kept[i], kept[i + 1]))
        kept[i].merge(kept.pop(i + 1))
    return kept


def _loss(a: Segment, b: Segment) -> float:
    n, m = a.steps, b.steps
    names = a.reasons.keys() | b.reasons.keys()
    apart = sum((a.reasons.get(name, 0) / n - b.reasons.get(name, 0) / m) ** 2 for name in names)
    return n * m / (n + m) * apart


def _steps_of(record: StepRecord, plan: StepPlan, batch: RequestBatch, note: _Note) -> list[Segment]:
    """[R] the step as each request of the batch went through it; its end is not known yet."""
    verified = verified_by_request(record)
    proposed = np.zeros(batch.size, dtype=np.int32)
    for proposal in record.proposals:
        proposed += proposal.sizes
    sizes = plan.trees.sizes
    owner = np.repeat(np.arange(batch.size), sizes)
    expected = np.bincount(owner, np.zeros(len(owner)) if plan.reach is None else plan.reach, batch.size)
    reasons = _reasons_of(plan, note.limits.max_nodes > 0, proposed > 0, sizes > 0)
    steps = []
    columns = (batch.views, batch.num_tokens.tolist(), reasons, expected.tolist())
    for view, num_tokens, reason, share in zip(*columns, strict=True):
        first = num_tokens - view.num_prompt_tokens
        nodes, accepted = verified.get(view.request_id, (0, 0))
        step = Segment(first, first, note.begin_s, note.begin_s, {reason: 1}, nodes, accepted, share, batch=batch.size)
        step.foretold = int(plan.expected_ms > 0.0)
        step.expected_ms, step.plain_ms = plan.expected_ms, plan.plain_ms
        steps.append(step)
    return steps


def _reasons_of(plan: StepPlan, asked: BoolArray, proposed: BoolArray, kept: BoolArray) -> list[str]:
    """Why each request got its draft, or none.

    Args:
        asked, proposed, kept: [R] bool: drafters were asked for it; knew something; and something of that was chosen.
    """
    own = why(plan)
    is_any_kept = bool(kept.any())
    reasons = []
    for was_asked, was_proposed, was_kept in zip(asked.tolist(), proposed.tolist(), kept.tolist(), strict=True):
        if not was_asked:
            reasons.append("nothing to draft")
        elif not was_proposed:
            reasons.append("nothing proposed")
        else:
            reasons.append("left out" if is_any_kept and not was_kept else own)
    return reasons


def _position(view: RequestView) -> int:
    """Tokens of the answer so far."""
    return len(view.token_ids) - view.num_prompt_tokens
