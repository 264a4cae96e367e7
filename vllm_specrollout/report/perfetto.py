"""A trace as Chrome's trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Three processes: the engine, with a track of its steps and counters beside it; the drafters, with a track each; and the
requests, with a track each. A request's slice is a stretch of steps with one reason. A trace does not tell how long
each drafter took: a slice of theirs is as long as asking all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vllm_specrollout.replay.records import Trace
from vllm_specrollout.report.rollouts import Steps, steps_of
from vllm_specrollout.report.walk import Walk, walk

ENGINE, DRAFTERS, REQUESTS = 1, 2, 3
"""Processes of the picture."""
Event = dict[str, Any]


def trace_events(trace: Trace) -> dict[str, Any]:
    """The JSON object that Perfetto opens.

    Raises:
        TraceError: as `walk` does.
    """
    table = walk(trace)
    steps = steps_of(trace, table)
    events = [
        *_names(trace, table),
        *_steps(table, steps),
        *_drafters(trace, table, steps),
        *_requests(trace, table, steps),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": trace.header.model}}


def _names(trace: Trace, table: Walk) -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (DRAFTERS, "drafters"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    drafters = [*trace.header.drafters, *(f"drafter {i}" for i in range(table.proposed_by.shape[1]))]
    tracks = [(ENGINE, 1, "steps")]
    tracks += [(DRAFTERS, i + 1, drafters[i]) for i in range(table.proposed_by.shape[1])]
    tracks += [
        (REQUESTS, arrival.request + 1, f"request {arrival.request} {arrival.problem_id}".strip())
        for arrival in trace.arrivals
    ]
    for pid, tid, name in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(pid: int, tid: int, name: str, begin: float, end: float, **args: Any) -> Event:
    """Milliseconds to microseconds, whole ones: a slice ends exactly where its neighbour begins."""
    ts = round(begin * 1e3)
    return {
        "ph": "X", "cat": "spec_rollout", "pid": pid, "tid": tid, "name": name, "ts": ts,
        "dur": round(end * 1e3) - ts, "args": args,
    }  # fmt: skip


def _steps(table: Walk, steps: Steps) -> Iterator[Event]:
    names = ("begin", "end", "running", "waiting", "nodes", "accepted", "tokens")
    columns = zip(*(getattr(steps, name).tolist() for name in names), table.step_why.tolist(), strict=True)
    for number, (begin, end, running, waiting, nodes, accepted, tokens, why) in enumerate(columns):
        counts = {"running": running, "nodes": nodes, "accepted": accepted, "tokens": tokens}
        yield _slice(ENGINE, 1, table.reasons[why], begin, end, step=number, waiting=waiting, **counts)
        for name, value in (*counts.items(), ("waiting", waiting)):
            yield {
                "ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": round(begin * 1e3), "args": {name: value}
            }  # fmt: skip


def _drafters(trace: Trace, table: Walk, steps: Steps) -> Iterator[Event]:
    """Drafters were asked when the step before had its verdicts."""
    zero = trace.steps[0].at_ms - steps.end[0] if trace.steps else 0.0
    for number, step in enumerate(trace.steps[:-1], 1):
        begin = step.at_ms - zero
        for drafter in np.flatnonzero(table.proposed_by[number]).tolist():
            proposed, accepted = (int(by[number, drafter]) for by in (table.proposed_by, table.accepted_by))
            # no longer than until the next time, which clocks that are read one after another do not promise
            end = min(begin + step.ask_ms, max(trace.steps[number].at_ms - zero, begin))
            yield _slice(DRAFTERS, drafter + 1, "asked", begin, end, step=number, proposed=proposed, accepted=accepted)


def _requests(trace: Trace, table: Walk, steps: Steps) -> Iterator[Event]:
    if not len(table.step):
        return
    owner = table.owner
    is_first = np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(table.why.astype(int)) != 0)])
    first = np.flatnonzero(is_first)
    last = np.concatenate([first[1:], [len(owner)]]) - 1
    sums = [np.add.reduceat(column.astype(np.int64), first) for column in (table.gained, table.nodes, table.accepted)]
    columns = (owner[first], table.why[first], table.step[first], table.step[last], last - first + 1, *sums)
    for request, why, begin, end, count, tokens, nodes, accepted in zip(*(c.tolist() for c in columns), strict=True):
        yield _slice(
            REQUESTS, request + 1, table.reasons[why], float(steps.begin[begin]), float(steps.end[end]),
            steps=count, tokens=tokens, nodes=nodes, accepted=accepted, tokens_per_step=round(tokens / count, 3),
        )  # fmt: skip
