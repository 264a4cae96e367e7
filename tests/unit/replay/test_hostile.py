"""A trace that nobody recorded so is refused with `TraceError`, or replays, and is drawn.

No other error, no hang, no gigabytes.
"""

import copy
import gzip
import json
import logging
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay.synthetic import TracePlan, make_trace
from tests.unit.replay.builders import header
from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.replay import files, records
from vllm_specrollout.replay.files import ThreadSink, read_trace, write_trace
from vllm_specrollout.replay.records import Step, TraceError
from vllm_specrollout.replay.simulate import replay
from vllm_specrollout.report.page import page_of
from vllm_specrollout.report.perfetto import trace_events

PATIENCE_S = 60  # no test waits so long unless it fails
WEIRD: list[Any] = [
    None, True, -1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**30, -(2**31) - 1, 1e308, float("nan"), float("inf"), -0.5,
    "x", "", [], {}, [[]], "tree", "off", "\ud800",
]  # fmt: skip


@pytest.fixture(scope="session")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A short trace with everything that one may hold; its cost is to be fitted."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(path, make_trace(TracePlan(requests=4, median=20, sibling=0.3)))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    columns = found[0]["timing"]
    timing = {name: 1 for name in columns} | {"is_decode_only": True, "step_ms": 5.0}
    for i, one in enumerate(found):
        if one.get("kind") == "step":
            one["timing"] = [timing[name] if name != "step_ms" else 5.0 + i % 3 for name in columns]
    return found


def _written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def _paths(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = []
    for key, value in below:
        found += [(*above, key), *_paths(value, (*above, key))]
    return found


def _is_told(path: Path, budget: str) -> bool:
    """Whether the file, whatever it holds, yields a result with a makespan, or a refusal with a way out."""
    try:
        trace = read_trace(path)
        found = replay(trace, make_budget(SpecRolloutConfig(budget=budget)))
    except TraceError as error:
        return bool(error.cause and error.hint)
    return math.isfinite(found.makespan_ms) and found.makespan_ms >= 0


def _is_drawn(path: Path) -> bool:
    """Whether the file, whatever it holds, has a page and tracks, or is refused with a way out."""
    try:
        trace = read_trace(path)
        return bool(page_of(trace, path.name)) and all(
            event.get("dur", 0) >= 0 for event in trace_events(trace)["traceEvents"]
        )
    except TraceError as error:
        return bool(error.cause and error.hint)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_trace_with_any_value_in_any_place_is_refused_or_replays(lines, folder, data):
    found = list(lines)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        # the header as often as all others
        number = data.draw(st.one_of(st.just(0), st.integers(0, len(found) - 1)), label="line")
        one = found[number] = copy.deepcopy(found[number])
        *above, key = data.draw(st.sampled_from(_paths(one)), label="place")
        for step in above:
            one = one[step]
        one[key] = data.draw(st.sampled_from(WEIRD), label="value")
    path = _written(folder / "t.jsonl", found)
    assert _is_told(path, data.draw(st.sampled_from(names()), label="budget")) and _is_drawn(path)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_trace_with_damaged_bytes_is_refused_or_replays(lines, folder, data):
    content = ("\n".join(map(json.dumps, lines)) + "\n").encode()
    suffix = data.draw(st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst"]))
    pack = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}.get(suffix, bytes)
    changed = bytearray(pack(content))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path = folder / f"t.{suffix}"
    path.write_bytes(changed)
    assert _is_told(path, "auto") and _is_drawn(path)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("max_num_seqs", 0, "`int` >= 1 - at `$.max_num_seqs`"),
        ("max_num_seqs", float("nan"), "JSON is malformed"),
        ("max_num_batched_tokens", -1, "`int` >= 1 - at `$.max_num_batched_tokens`"),
        ("max_depth", 65, "`int` <= 64 - at `$.max_depth`"),
        ("cost", {"fixed": 1.0, "prompt_share": 1.5}, "`float` <= 1.0 - at `$.cost.prompt_share`"),
        ("timing", ["rows", "batch"], "timings have the columns rows, batch"),
    ],
)
def test_an_engine_that_cannot_be_is_no_header(lines, tmp_path, name, value, cause):
    path = _written(tmp_path / "t.jsonl", [lines[0] | {name: value}, *lines[1:]])
    with pytest.raises(TraceError, match=re.escape(cause)):
        read_trace(path)


def test_prompts_that_memory_has_no_room_for_are_refused(lines, tmp_path):
    longer = [one | {"num_prompt_tokens": 2**31} if one.get("kind") == "arrival" else one for one in lines]
    trace = read_trace(_written(tmp_path / "t.jsonl", longer))
    with pytest.raises(TraceError, match="tokens of prompts"):
        replay(trace, make_budget(SpecRolloutConfig(budget="off")))


def test_prompts_that_take_too_many_steps_are_refused_whoever_says_how_many_rows_they_have():
    trace = make_trace(TracePlan(requests=4, median=20, sibling=0.3))
    budget = make_budget(SpecRolloutConfig(budget="off"))
    with pytest.raises(TraceError, match="rows of prompts"):
        replay(trace, budget, CostLine(fixed=1.0, prompt_share=1e18))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_expands_without_end_is_given_up_early(tmp_path, monkeypatch, suffix):
    bomb = bytes(1 << 26)
    path = tmp_path / f"t.jsonl.{suffix}"
    path.write_bytes(gzip.compress(bomb) if suffix == "gz" else zstandard.ZstdCompressor(level=19).compress(bomb))
    assert path.stat().st_size < 1 << 17
    monkeypatch.setattr(files, "MOST_LINE", 1 << 20)
    with pytest.raises(TraceError, match="a line of more than"):
        read_trace(path)
    sizes = [len(chunk) for chunk in files.PackedLines(path)._chunks()]
    assert sum(sizes) == 1 << 26 and max(sizes) <= 1 << 25


def test_any_error_ends_a_recording_and_not_its_thread(tmp_path, monkeypatch, caplog):
    sink = ThreadSink(tmp_path / "t.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(records, "encode", lambda record: [][1])
        for _ in range(1000):
            sink.write(header())
        sink.close()
    assert not sink._thread.is_alive() and sink._queue.empty()
    assert "cannot be written any further" in caplog.text


@pytest.fixture
def stands_still(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ThreadSink, threading.Event]:
    """A sink onto a disk that lets no record through until it is told to go on."""
    sink, go = ThreadSink(tmp_path / "t.jsonl", patience_s=0.0), threading.Event()
    write = sink._writer.write
    monkeypatch.setattr(sink._writer, "write", lambda record: go.wait(PATIENCE_S) and write(record))
    return sink, go


def test_a_recording_onto_a_disk_that_stands_still_ends_where_memory_does_and_says_so_once(
    stands_still, tmp_path, monkeypatch, caplog
):
    sink, go = stands_still
    monkeypatch.setattr(files, "MOST_WAITING", 100 * 512)
    sink.write(header())
    for number in range(1000):
        sink.write(Step(at_ms=float(number)))
    assert sink._queue.qsize() <= 101 and sink.dropped >= 1000 - 101
    assert caplog.text.count("stands still") == 1
    # what comes when there is room again would leave a hole
    go.set()
    dropped = sink.dropped
    sink.write(Step(at_ms=1e6))
    assert sink.dropped == dropped + 1
    sink._patience_s = PATIENCE_S
    sink.close()
    assert f"{sink.dropped} records of its end are missing" in caplog.text
    back = read_trace(tmp_path / "t.jsonl")
    assert [step.at_ms for step in back.steps] == [float(number) for number in range(1000 - dropped)]


def test_closing_a_recording_does_not_wait_for_a_disk_that_stands_still(stands_still, caplog):
    sink, go = stands_still
    for _ in range(3):
        sink.write(header())
    sink.close()
    assert not go.is_set() and "is not whole" in caplog.text
    # nor does the interpreter's end
    assert sink._thread.is_alive() and sink._thread.daemon
    go.set()
    sink._thread.join(PATIENCE_S)
    assert not sink._thread.is_alive()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_disk_ends_a_recording(caplog):
    with caplog.at_level(logging.ERROR):
        sink = ThreadSink(Path("/dev/full"))
        for number in range(5000):
            sink.write(Step(at_ms=float(number)))
        sink.close()
    assert not sink._thread.is_alive() and "No space left" in caplog.text
