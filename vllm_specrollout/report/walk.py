"""What each request did in each step of a trace, worked out from its records.

A running request gains a token in every step, and one more for each accepted node. A draft says how many tokens its
request had when it was made: where that differs, since the request was preempted, the draft is right. Of requests that
nobody looked at for a while nothing better is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.replay.records import Candidates, Step, Trace, TraceError
from vllm_specrollout.types import MOST_NODES, SOURCES

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MOST_ROWS = 1 << 26
"""Steps of all requests together; 16 bytes each, and as much again while they are sorted."""
PROMPT = "prompt"
LEFT_OUT = "left out"
NOTHING_PROPOSED = "nothing proposed"
PAUSED, NOT_ASKED = "drafting paused", "not asked"
_FOREVER, _MOST_GAINED = 1 << 50, (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Walk:
    """Rows: each request in each step in which it ran, by request and then by step."""

    # [R + 1] the first row of each request
    start: Ints
    # [K] int32: the step, an index into `Trace.steps`
    step: npt.NDArray[np.int32]
    # [K] int32: tokens gained, draft nodes verified, and accepted
    gained: npt.NDArray[np.int32]
    nodes: Bytes
    accepted: Bytes
    # [K] why the request had its draft, or none: an index into `reasons`
    why: npt.NDArray[np.uint16]
    # [K] int32: the draft, an index into `trees`; -1: none
    tree: npt.NDArray[np.int32]
    reasons: tuple[str, ...]
    trees: tuple[Candidates, ...]
    # [S] why the step had its drafts, or none
    step_why: Ints
    # [S, drafters] nodes proposed for the step, and accepted in it
    proposed_by: Ints
    accepted_by: Ints

    @property
    def owner(self) -> Ints:
        """[K] the request of each row."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


def walk(trace: Trace) -> Walk:
    """Raises:
    TraceError: a step speaks of a request that has not arrived, or there is more than memory is spent on.
    """
    return _Walker(trace).walk()


class _Walker:
    """The requests that run, step after step."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        count = len(trace.arrivals)
        ends = trace.ends
        self._lengths = np.array([len(ends[i].token_ids) if i in ends else _FOREVER for i in range(count)], np.int64)
        self._arriving: dict[int, list[int]] = {}
        for arrival in trace.arrivals:
            self._arriving.setdefault(arrival.step, []).append(arrival.request)
        self._position = np.zeros(count, np.int64)
        self._runs = np.zeros(count, np.bool_)
        # of the step at hand, by request; wiped behind each step
        self._nodes, self._accepted = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._told = np.full(count, -1, np.int64)
        # drafts made for the step at hand
        self._tree = np.full(count, -1, np.int64)
        self._reasons: dict[str, int] = {}
        self._trees: list[Candidates] = []
        self._rows: list[tuple[npt.NDArray[np.int32], ...]] = []
        self._num_rows = 0

    def walk(self) -> Walk:
        steps, none = self._trace.steps, Step(at_ms=0.0)
        proposed, accepted = np.zeros((2, len(steps), SOURCES), np.int64)
        step_why = np.zeros(len(steps), np.int64)
        running = np.zeros(0, np.int64)
        for i, (before, step) in enumerate(pairwise((none, *steps))):
            self._check(step)
            step_why[i] = self._reason(_why(before))
            proposed[i], accepted[i] = self._sources(before, step)
            running = self._step(i, before, step, running)
            self._rest(before, step)
        used = max(len(self._trace.header.drafters), *(1 + np.flatnonzero(proposed.any(axis=0))), 1)
        owner, step_of, gained, nodes, took, why, tree = self._sorted()
        return Walk(
            start=np.searchsorted(owner, np.arange(len(self._runs) + 1)),
            step=step_of,
            gained=gained,
            nodes=nodes.astype(np.uint8),
            accepted=took.astype(np.uint8),
            why=why.astype(np.uint16),
            tree=tree,
            reasons=tuple(self._reasons),
            trees=tuple(self._trees),
            step_why=step_why,
            proposed_by=proposed[:, :used],
            accepted_by=accepted[:, :used],
        )

    def _check(self, step: Step) -> None:
        count = len(self._runs)
        for number in _named(step):
            if number >= count:
                raise TraceError(
                    f"the trace speaks of request {number}, and {count} have arrived",
                    "record it again; the file was changed, or is not a recorder's",
                )

    def _sources(self, before: Step, step: Step) -> tuple[Ints, Ints]:
        """Nodes of each drafter: proposed for the step, and accepted in it."""
        drafts, ends = before.candidates, self._trace.ends
        start = np.cumsum([0, *(len(one.token_ids) for one in drafts)]).astype(np.int32)
        tokens, parents = _column(one.token_ids for one in drafts), _column(one.parents for one in drafts)
        source = _column(sources_of(one) for one in drafts)
        taken = {one.request: one.accepted for one in step.verified if one.request in ends}
        ahead, counts = np.full((len(drafts), MOST_NODES), -1, np.int32), np.zeros(len(drafts), np.int32)
        for row, one in enumerate(drafts):
            if took := min(taken.get(one.request, 0), MOST_NODES):
                truth = ends[one.request].token_ids[one.position : one.position + took]
                ahead[row, : len(truth)], counts[row] = truth, len(truth)
        walked, nodes = _core.follow(start, parents, tokens, ahead, counts)
        accepted = source[np.repeat(start[:-1], walked) + nodes]
        return np.bincount(source, minlength=SOURCES), np.bincount(accepted, minlength=SOURCES)

    def _step(self, i: int, before: Step, step: Step, running: Ints) -> Ints:
        """Rows of the step's requests; returns those that run on."""
        for one in step.verified:
            self._nodes[one.request] = min(one.drafted, MOST_NODES)
            self._accepted[one.request] = min(one.accepted, MOST_NODES)
        for drafts in step.candidates:
            self._told[drafts.request] = drafts.position
        named = np.array(_named(step), np.int64)
        # one that was lost sight of is not over after all, nor is one whose draft was verified
        found = named[
            ~self._runs[named]
            & (self._position[named] > 0)
            & ((self._told[named] < self._lengths[named]) | (self._nodes[named] > 0))
        ]
        new = np.array(self._arriving.get(i, ()), np.int64)
        ids = np.concatenate([running, np.unique(found), new])
        self._runs[ids] = True
        old, length, told = self._position[ids], self._lengths[ids], self._told[ids]
        position = np.minimum(np.where(told >= 0, told, old + 1 + self._accepted[ids]), length)
        self._position[ids] = position
        why = self._whys(ids, len(new), before, step)
        # a request may end with nothing of what its last step verified
        ran = (position > old) | (self._nodes[ids] > 0)
        self._num_rows += int(ran.sum())
        if self._num_rows > MOST_ROWS:
            raise TraceError(f"the trace has more than {MOST_ROWS} steps of requests", "record a shorter run")
        verdicts = (self._nodes[ids], self._accepted[ids])
        columns = (ids, np.full(len(ids), i), np.minimum(position - old, _MOST_GAINED), *verdicts, why, self._tree[ids])
        self._rows.append(tuple(column[ran].astype(np.int32) for column in columns))
        over = position >= length
        self._runs[ids[over]] = False
        return ids[~over]

    def _rest(self, before: Step, step: Step) -> None:
        """Wipe what was noted for this step, and note the drafts of the next one."""
        for one in step.verified:
            self._nodes[one.request] = self._accepted[one.request] = 0
        for drafts in before.candidates:
            self._tree[drafts.request] = -1
        for number, drafts in enumerate(step.candidates, len(self._trees)):
            self._tree[drafts.request], self._told[drafts.request] = number, -1
        self._trees += step.candidates

    def _whys(self, ids: Ints, num_new: int, before: Step, step: Step) -> Ints:
        own = self._reason(_why(before))
        why = np.full(len(ids), own)
        if before.views and not before.reason.startswith("off"):
            why[(self._tree[ids] < 0)] = self._reason(NOTHING_PROPOSED)
            if step.verified:
                why[(self._tree[ids] >= 0) & (self._nodes[ids] == 0)] = self._reason(LEFT_OUT)
        why[self._nodes[ids] > 0] = own
        why[len(ids) - num_new :] = self._reason(PROMPT)
        return why

    def _reason(self, text: str) -> int:
        return self._reasons.setdefault(text, len(self._reasons))

    def _sorted(self) -> list[npt.NDArray[np.int32]]:
        if not self._rows:
            return [np.zeros(0, np.int32)] * 7
        columns = [np.concatenate([rows[k] for rows in self._rows]) for k in range(7)]
        self._rows.clear()
        order = np.argsort(columns[0], kind="stable")
        return [column[order] for column in columns]


def _why(before: Step) -> str:
    """Why a step has its drafts, or none, by the record before it."""
    if before.views:
        return before.reason or "drafted"
    return f"{PAUSED}: {before.reason}" if before.reason else NOT_ASKED


def _named(step: Step) -> list[int]:
    """Requests that a record speaks of."""
    return [one.request for one in step.verified] + [one.request for one in step.candidates]


def sources_of(one: Candidates) -> list[int]:
    """The drafter of each node."""
    return one.source if isinstance(one.source, list) else [one.source] * len(one.token_ids)


def _column(lists: Iterable[list[int]]) -> npt.NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(lists), np.int32)
