"""Times of a trace's steps, and the rollouts in it: stretches of steps in which somebody runs, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.replay.records import Trace
from vllm_specrollout.report.walk import PROMPT, Ints, Walk

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Columns over the steps; times are milliseconds since the first one began."""

    # [S]
    begin: Floats
    end: Floats
    # [S] requests that ran, those whose prompts were computed included; and that waited for a place
    running: Ints
    waiting: Ints
    # [S] nobody ran on behind the step, and nobody waited
    is_last: npt.NDArray[np.bool_]
    # [S] requests that came, draft nodes verified and accepted, and tokens
    arrived: Ints
    nodes: Ints
    accepted: Ints
    tokens: Ints
    # [S] requests whose prompts were there before, and their tokens
    decoding: Ints
    decoded: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpan:
    """Steps from one at which nobody had run before to one behind which nobody runs."""

    # steps, from the first to behind the last
    first: int
    behind: int
    # milliseconds
    begin: float
    end: float
    # from here on, less than half as many ran as at most
    tail: float
    requests: int
    tokens: int
    # of requests whose prompts were there before: tokens, and requests, summed over the steps
    decoded: int
    decoding: int
    most_running: int
    verified: int
    accepted: int
    # steps that verified no draft
    steps_off: int
    # drafter -> nodes proposed, verified (None: the trace does not say), accepted
    proposed_by: list[int]
    verified_by: list[int] | None
    accepted_by: list[int]
    # by context, in octaves: its least tokens; and of steps without a prompt their requests, their tokens, draft nodes
    # verified and accepted
    by_context: list[tuple[int, int, int, int, int]]


def steps_of(trace: Trace, table: Walk) -> Steps:
    """A step begins where the one before it ended, but where the engine had nothing to do in between."""
    count = len(trace.steps)
    timings = [trace.timing_of(i) for i in range(count)]
    is_decode = np.array([reason != PROMPT for reason in table.reasons], np.bool_)[table.why]
    # a request's first row and its last one
    has_rows = np.diff(table.start) > 0
    first, last = table.start[:-1][has_rows], table.start[1:][has_rows] - 1
    ending = np.bincount(table.step[last], minlength=count)
    running, waiting = np.bincount(table.step, minlength=count), np.zeros(count, np.int64)
    for i, timing in enumerate(timings):
        if timing is not None:
            running[i], waiting[i] = max(timing.batch, running[i]), timing.waiting
    is_last = (ending > 0) & (running <= ending) & (waiting == 0)
    end = np.maximum.accumulate(np.array([step.at_ms for step in trace.steps], np.float64))
    begin = np.concatenate([end[:1], end[:-1]])
    for i in [0, *(1 + np.flatnonzero(is_last[:-1]))][:count]:
        # nobody was told of the last one's time
        if (timing := timings[i]) is not None:
            begin[i] = max(end[i] - timing.step_ms, begin[i]) if i else end[i] - timing.step_ms
    zero = begin[0] if count else 0.0
    return Steps(
        begin=begin - zero,
        end=end - zero,
        running=running,
        waiting=waiting,
        is_last=is_last,
        arrived=np.bincount(table.step[first], minlength=count),
        nodes=_sums(table.step, table.nodes, count),
        accepted=_sums(table.step, table.accepted, count),
        tokens=_sums(table.step, table.gained, count),
        decoding=_sums(table.step, is_decode, count),
        decoded=_sums(table.step, table.gained * is_decode, count),
    )


def _sums(step: npt.NDArray[np.int32], values: npt.NDArray[Any], count: int) -> Ints:
    return np.bincount(step, values, count).astype(np.int64)


def rollouts_of(trace: Trace, table: Walk, steps: Steps) -> list[RolloutSpan]:
    """In their order; steps without a request belong to the rollout that follows, or else to the last one."""
    edges = np.unique(np.concatenate([[0], 1 + np.flatnonzero(steps.is_last), [len(trace.steps)]])).tolist()
    if len(edges) > 2 and not steps.running[edges[-2] :].any():
        del edges[-2]
    octaves = _octaves(trace, table)
    return [_rollout(trace, table, steps, octaves, slice(*own)) for own in pairwise(edges)]


def _octaves(trace: Trace, table: Walk) -> Ints:
    """[K] of the context that a row's request has before the step, prompt and answer; -1: its prompt was computed."""
    owner, before = table.owner, np.cumsum(table.gained) - table.gained
    prompts = np.array([arrival.num_prompt_tokens for arrival in trace.arrivals], np.int64)
    first = before[np.minimum(table.start[:-1], max(len(before) - 1, 0))] if len(before) else before
    context = prompts[owner] + before - first[owner]
    is_decode = np.array([reason != PROMPT for reason in table.reasons], np.bool_)[table.why]
    return np.where(is_decode & (context > 0), np.log2(np.maximum(context, 1)).astype(np.int64), -1)


def _by_context(table: Walk, octaves: Ints, steps: slice) -> list[tuple[int, int, int, int, int]]:
    own = (table.step >= steps.start) & (table.step < steps.stop) & (octaves >= 0)
    columns = (np.ones(len(octaves)), table.gained, table.nodes, table.accepted)
    sums = [np.bincount(octaves[own], column[own]).astype(np.int64).tolist() for column in columns]
    return [(1 << octave, *found) for octave, found in enumerate(zip(*sums, strict=True)) if found[0]]


def _rollout(trace: Trace, table: Walk, steps: Steps, octaves: Ints, own: slice) -> RolloutSpan:
    running = steps.running[own]
    most = int(running.max())
    told = [step.sources for step in trace.steps[own] if step.verified]
    num_drafters = table.proposed_by.shape[1]
    by = [[*sources, *([0] * num_drafters)][:num_drafters] for sources in told]
    columns = (steps.arrived, steps.tokens, steps.decoded, steps.decoding, steps.nodes, steps.accepted)
    requests, tokens, decoded, decoding, verified, accepted = (int(column[own].sum()) for column in columns)
    return RolloutSpan(
        first=own.start,
        behind=own.stop,
        begin=float(steps.begin[own.start]),
        end=float(steps.end[own.stop - 1]),
        tail=float(steps.end[own.start + np.flatnonzero(2 * running >= most)[-1]]),
        requests=requests,
        tokens=tokens,
        decoded=decoded,
        decoding=decoding,
        most_running=most,
        verified=verified,
        accepted=accepted,
        steps_off=own.stop - own.start - len(told),
        proposed_by=table.proposed_by[own].sum(axis=0).tolist(),
        verified_by=np.sum(by, axis=0).tolist() if all(told) and by else None,
        accepted_by=table.accepted_by[own].sum(axis=0).tolist(),
        by_context=_by_context(table, octaves, own),
    )
