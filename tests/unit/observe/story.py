"""Stories of one request, told in segments by hand."""

from __future__ import annotations

from vllm_specrollout.observe.timeline import Segment, Timeline

SUMS = ("steps", "nodes", "accepted", "expected", "foretold", "expected_ms", "plain_ms", "batch")


def step(first, reason="pays", nodes=0, accepted=0, end_s=0.0, **values):
    return Segment(first, first + 1 + accepted, 0.0, end_s, {reason: 1}, nodes, accepted, **values)


def steps_of(reasons):
    return [step(i, reason, nodes=i % 5, expected=float(i % 3), batch=i % 4) for i, reason in enumerate(reasons)]


def totals(segments):
    return {name: sum(getattr(one, name) for one in segments) for name in SUMS}


def reasons_of(segments):
    return {reason: sum(one.reasons.get(reason, 0) for one in segments) for one in segments for reason in one.reasons}


def written(steps, keep=4):
    timeline = Timeline(keep)
    for one in steps:
        timeline.add("r-1", "r", one)
    ((name, segments),) = timeline.segments()
    assert name == "r"
    return segments


def is_gapless(segments):
    return all(a.end == b.first for a, b in zip(segments, segments[1:], strict=False))
