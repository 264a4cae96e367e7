"""What was decided for single requests, when and why: kept while somebody asks for it, told as a few lines. Pure.

What belongs here: the watch over a policy, how its steps become stretches, and how stretches become fewer. A step's
story needs three calls: `decide` and `choose` say what was meant, `observe` what came of it; the request's next view,
or its end, says how many tokens that were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_specrollout.policies.budget import Policy
from vllm_specrollout.trees.build import cumulative_log_q
from vllm_specrollout.types import Choice, Decision, DraftTree, Ending, Feedback, RequestView, StepTiming

_MOST_STRETCHES = 128
"""Of one request; beyond that, neighbours are joined two by two, and the story gets coarser."""
_MOST_RUNNING = 4096
"""Requests without an end that are remembered."""


@dataclass(slots=True)
class Stretch:
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

    def take_in(self, later: Stretch) -> None:
        """Go on to the end of the stretch that follows."""
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


class Journal:
    """Stretches of like steps by request: of all that run, and of the last `keep` that ended."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        # request id -> (the name its client knows, stretches); the one that came or ended first stands first
        self._running: dict[str, tuple[str, list[Stretch]]] = {}
        self._ended: dict[str, tuple[str, list[Stretch]]] = {}

    def add(self, request_id: str, name: str, step: Stretch) -> None:
        """One step (or several alike) of a request; where it is like the one before, it joins that one's stretch."""
        if request_id not in self._running:
            if len(self._running) >= _MOST_RUNNING:
                del self._running[next(iter(self._running))]
            self._running[request_id] = (name, [])
        stretches = self._running[request_id][1]
        if stretches and stretches[-1].reasons.keys() == step.reasons.keys():
            stretches[-1].take_in(step)
            return
        if len(stretches) >= _MOST_STRETCHES:
            for i in range(0, len(stretches) - 1, 2):
                stretches[i].take_in(stretches[i + 1])
            del stretches[1::2]
        stretches.append(step)

    def end(self, request_id: str, num_tokens: int) -> None:
        """The answer is over, and so many tokens long; what was sampled behind its end is none of it."""
        entry = self._running.pop(request_id, None)
        if entry is None:
            return
        for stretch in entry[1]:
            stretch.end = min(stretch.end, num_tokens)
        self._ended[request_id] = entry
        if len(self._ended) > self.keep:
            del self._ended[next(iter(self._ended))]

    def stretches(self) -> list[tuple[str, list[Stretch]]]:
        """(name of a request, its stretches in order), of all that are kept."""
        return [*self._ended.values(), *self._running.values()]


def condensed(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most so many stretches of the same steps: neighbours that are most alike in their reasons are joined first.

    Joining costs the squared distance of both mixes of reasons, weighed by their steps (Ward, "Hierarchical grouping to
    optimize an objective function", 1963): steps that alternate melt together, a long phase of its own stays.
    """
    kept = [replace(stretch, reasons=dict(stretch.reasons)) for stretch in stretches]
    while len(kept) > max(most, 1):
        i = min(range(len(kept) - 1), key=lambda i: _loss(kept[i], kept[i + 1]))
        kept[i].take_in(kept.pop(i + 1))
    return kept


def _loss(a: Stretch, b: Stretch) -> float:
    n, m = a.steps, b.steps
    names = a.reasons.keys() | b.reasons.keys()
    apart = sum((a.reasons.get(name, 0) / n - b.reasons.get(name, 0) / m) ** 2 for name in names)
    return n * m / (n + m) * apart


@dataclass(slots=True)
class _Pending:
    """A step that was decided on, and is not known to be over."""

    name: str
    # steps that had been settled when it was decided on
    settled: int
    step: Stretch
    # what was meant for the request: decided here, or after drafting
    decision: Decision


@dataclass(slots=True)
class _Asked:
    """What `decide` answered, for `choose`."""

    views: Sequence[RequestView] = ()
    decisions: Sequence[Decision] = field(default_factory=list)


class JournaledPolicy:
    """A policy whose decisions are written down; `inner` makes them. Clock: seconds, from any zero.

    Times in the journal count from the first step that settles while it is kept.
    """

    def __init__(self, inner: Policy, journal: Journal, clock: Callable[[], float]) -> None:
        self.inner = inner
        self.journal = journal
        self._clock = clock
        self._zero: float | None = None
        self._settled = 0
        self._pending: dict[str, _Pending] = {}
        self._asked = _Asked()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rests(self, batch: int) -> bool:
        """Never: every request is written down in every step."""
        return False

    def rest_left(self) -> int:
        return 0

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        now = self._now()
        for view in views:
            self._close(view.request_id, len(view.token_ids) - view.num_prompt_tokens, now)
        decisions = self.inner.decide(views)
        self._asked = _Asked(views, decisions)
        is_asking = any(decision.max_nodes for decision in decisions)
        choice = self.inner.explain()
        if is_asking:
            reason, choice = "no drafter is left", None  # unless `choose` is called
        elif choice is not None and not choice.is_on:
            reason = _reason_of(choice)
        else:
            reason, choice = "nothing to draft", None  # whatever was chosen is of an earlier step
        for view, decision in zip(views, decisions, strict=True):
            first = len(view.token_ids) - view.num_prompt_tokens
            step = Stretch(first, first, now, now, {reason: 1}, batch=len(views))
            _expect(step, choice, 0.0)
            self._pending[view.request_id] = _Pending(view.name or view.request_id, self._settled, step, decision)
        return decisions

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        chosen = self.inner.choose(trees, decisions)
        choice = self.inner.explain()
        shares = _shares(chosen) if choice is not None and choice.expected_tokens > 0.0 else [0.0] * len(chosen)
        rows = zip(self._asked.views, self._asked.decisions, trees, chosen, shares, strict=True)
        for view, decision, proposed, kept, share in rows:
            step = self._pending[view.request_id].step
            step.reasons = {_why(choice, decision, proposed, kept): 1}
            _expect(step, choice, share)
        return chosen

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        if self._zero is None:
            self._zero = self._clock()
        self._settled += 1
        for item in feedback:
            pending = self._pending.get(item.request_id)
            if pending is not None:
                pending.step.nodes += item.drafted
                pending.step.accepted += item.accepted
        self.inner.observe(feedback, timing)

    def finish(self, ending: Ending) -> None:
        self._close(ending.request_id, len(ending.token_ids), self._now())
        self.journal.end(ending.request_id, len(ending.token_ids))
        self.inner.finish(ending)

    def explain(self) -> Choice | None:
        return self.inner.explain()

    def told(self) -> list[tuple[str, list[Stretch]]]:
        """`Journal.stretches`, with steps that are over although no further one came to say so."""
        now = self._now()
        for request_id in list(self._pending):
            self._close(request_id, None, now)
        return self.journal.stretches()

    def _now(self) -> float:
        return 0.0 if self._zero is None else self._clock() - self._zero

    def _close(self, request_id: str, length: int | None, now: float) -> None:
        """The request has so many tokens now (None: as many as its last step yielded)."""
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.settled == self._settled:
            return  # it never ran
        step = pending.step
        grown = step.accepted + 1 if length is None else length - step.first
        if grown <= 0:
            return  # preempted, or over before
        # where steps leave no room for drafts, nobody is asked: each of them yields one token
        own = min(step.accepted + 1, grown)
        step.end, rest = step.first + own, grown - own
        step.end_s = step.begin_s + (now - step.begin_s) / (1 + rest)
        self.journal.add(request_id, pending.name, step)
        if rest:
            unasked = Stretch(step.end, step.end + rest, step.end_s, now, {"not asked": rest}, batch=rest * step.batch)
            self.journal.add(request_id, pending.name, unasked)


def _why(choice: Choice | None, decision: Decision, proposed: DraftTree, kept: DraftTree) -> str:
    """Why this request got its draft, or none."""
    if not decision.max_nodes:
        return "nothing to draft"
    if not proposed.size:
        return "nothing proposed"
    if not kept.size and choice is not None and choice.nodes:
        return "left out"  # others' nodes were chosen
    return "unexplained" if choice is None else _reason_of(choice)


def _reason_of(choice: Choice) -> str:
    return choice.reason if choice.is_on or choice.reason == "off" else f"off: {choice.reason}"


def _expect(step: Stretch, choice: Choice | None, share: float) -> None:
    if choice is not None:
        step.expected = share * choice.expected_tokens
        step.foretold = int(choice.expected_ms > 0.0)
        step.expected_ms, step.plain_ms = choice.expected_ms, choice.plain_ms


def _shares(trees: Sequence[DraftTree]) -> list[float]:
    """Each request's share of what the drafts are expected to add: budgets tell only the sum.

    It is divided as the drafters' own probabilities have it, so where one request drafts alone, its share is exact.
    """
    reached = [sum(map(math.exp, cumulative_log_q(tree))) for tree in trees]
    total = sum(reached)
    return [one / total if total else 0.0 for one in reached]
