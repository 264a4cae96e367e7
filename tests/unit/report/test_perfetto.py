"""Tracks for Perfetto, against the rules of Chrome's trace events (its "JSON object format")."""

from collections import defaultdict
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest

from tests.unit.report.pages import made_up
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.report.perfetto import DRAFTERS, ENGINE, REQUESTS, trace_events
from vllm_specrollout.report.walk import walk

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.jsonl.zst"))
WHOLE, NAME = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}
NAMES = {"enum": ["process_name", "process_sort_index", "thread_name", "thread_sort_index"]}
NUMBERS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "number"}}
WORDS = {"type": "object", "additionalProperties": {"type": ["number", "string"]}}
KINDS = {
    "X": {"cat": {"type": "string"}, "name": NAME, "ts": WHOLE, "dur": WHOLE, "args": WORDS},
    "C": {"name": NAME, "ts": WHOLE, "args": NUMBERS},
    "M": {"name": NAMES, "args": {"type": "object", "minProperties": 1, "maxProperties": 1}},
}
TRACK = {"pid": {"enum": [ENGINE, DRAFTERS, REQUESTS]}, "tid": WHOLE}
COLUMNS = [{"ph": {"const": kind}, **TRACK, **own} for kind, own in KINDS.items()]
EVENT = [{"type": "object", "additionalProperties": False, "properties": own, "required": [*own]} for own in COLUMNS]
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "additionalProperties": False,
    "properties": {
        "traceEvents": {"type": "array", "items": {"oneOf": EVENT}},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@pytest.fixture(scope="module", params=[TRACES[-1], None], ids=["long_tail", "made up"])
def drawn(request):
    trace = made_up(40, 8, 40.0, seed=5) if request.param is None else read_trace(request.param)
    return trace, msgspec.json.decode(msgspec.json.encode(trace_events(trace)))


def tracks(found, pid):
    """Track -> its slices."""
    slices = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == pid:
            slices[event["tid"]].append(event)
    return slices


def test_it_is_what_chrome_says_trace_events_are(drawn):
    assert not [*jsonschema.validators.validator_for(SCHEMA)(SCHEMA).iter_errors(drawn[1])]


def test_no_slice_of_a_track_begins_before_the_one_before_it_has_ended(drawn):
    for pid in (ENGINE, DRAFTERS, REQUESTS):
        own = tracks(drawn[1], pid)
        assert own
        for slices in own.values():
            ends = [one["ts"] + one["dur"] for one in slices]
            assert all(end <= after["ts"] for end, after in zip(ends[:-1], slices[1:], strict=True))


def test_every_track_with_a_slice_has_a_name_and_there_is_one_per_request_and_drafter(drawn):
    trace, found = drawn
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert {(pid, tid) for pid in (ENGINE, DRAFTERS, REQUESTS) for tid in tracks(found, pid)} <= set(names)
    assert [names[DRAFTERS, i + 1] for i in range(2)] == list(trace.header.drafters)
    assert len([pid for pid, _ in names if pid == REQUESTS]) == len(trace.arrivals)
    assert names[REQUESTS, 1] == f"request 0 {trace.arrivals[0].problem_id}"


def test_slices_and_counters_add_up_to_the_record(drawn):
    trace, found = drawn
    table = walk(trace)
    for tid, slices in tracks(found, REQUESTS).items():
        assert sum(one["args"]["tokens"] for one in slices) == len(trace.ends[tid - 1].token_ids)
        own = slice(table.start[tid - 1], table.start[tid])
        assert sum(one["args"]["steps"] for one in slices) == len(table.step[own])
        assert [one["name"] for one in slices][0] == "prompt"
    steps = tracks(found, ENGINE)[1]
    nodes = [sum(one.drafted for one in step.verified) for step in trace.steps]
    assert [one["args"]["nodes"] for one in steps] == nodes
    counted = [e["args"]["nodes"] for e in found["traceEvents"] if e["ph"] == "C" and e["name"] == "nodes"]
    assert counted == nodes
    by_drafter = tracks(found, DRAFTERS)
    accepted = [sum(one["args"]["accepted"] for one in by_drafter[i + 1]) for i in range(2)]
    assert accepted == table.accepted_by.sum(axis=0).tolist() and min(accepted) > 0
    assert np.sum(accepted) <= sum(one.accepted for step in trace.steps for one in step.verified)
