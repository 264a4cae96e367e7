import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay.synthetic import TracePlan, make_trace
from tests.unit.replay.builders import header, trace_of, tree
from vllm_specrollout.budgets.step_cost import Timing
from vllm_specrollout.replay.files import ThreadSink, TraceWriter, read_trace, write_trace
from vllm_specrollout.replay.records import Arrival, Candidates, End, Step, TraceError, Verified, decode, encode
from vllm_specrollout.types import DraftMode, DraftTree

NAMES = ("trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst")
numbers = st.integers(0, 1 << 30)
times = st.integers(0, 1 << 40).map(lambda n: n / 1000)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 12))
    column = st.lists(st.integers(0, 1 << 30), min_size=n, max_size=n)
    return DraftTree(
        np.asarray(draw(column), dtype=np.int32),
        np.asarray([draw(st.integers(-1, i - 1)) for i in range(n)], dtype=np.int32),
        (0.0 - np.asarray([draw(st.integers(0, 20_000)) / 1000 for _ in range(n)])).astype(np.float32),
        np.asarray(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)), dtype=np.int32),
    )


timings = st.builds(Timing, *[numbers] * 5, times, st.booleans(), *[numbers] * 3)
COUNTS = dict.fromkeys(("request", "step", "num_prompt_tokens", "max_tokens", "max_draft_tokens"), numbers)
arrivals = st.builds(
    Arrival, **COUNTS, problem_id=st.text(max_size=5), shape=st.sampled_from(DraftMode), ready_ms=times
)
ends = st.builds(
    End, request=numbers, status=st.sampled_from(["finished", "open"]), token_ids=st.lists(numbers, max_size=9)
)
steps = st.builds(
    Step,
    at_ms=times,
    ask_ms=times,
    views=numbers,
    timing=st.none() | timings,
    verified=st.lists(st.builds(Verified, numbers, numbers, numbers), max_size=3).map(tuple),
    candidates=st.lists(st.builds(Candidates.of, numbers, numbers, trees()), max_size=3).map(tuple),
)


@given(st.one_of(arrivals, ends, steps))
@settings(deadline=None)
def test_a_record_survives_being_written_and_read(record: object) -> None:
    back = decode(encode(record))
    assert back == record and encode(back) == encode(record)


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_the_same_however_it_is_packed(tmp_path: Path, name: str) -> None:
    trace = make_trace(TracePlan(requests=6, median=20, sibling=0.3))
    write_trace(tmp_path / name, trace)
    back = read_trace(tmp_path / name)
    assert not back.is_cut and back.header == trace.header and back.arrivals == trace.arrivals
    assert back.steps == trace.steps and back.ends == trace.ends


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_stops_in_the_middle_is_read_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writer = TraceWriter(path)
    for record in (header(), *(Step(at_ms=float(i)) for i in range(5))):
        writer.write(record)
    writer.flush()
    size = path.stat().st_size
    writer.write(Step(at_ms=9.0))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: size + 3])
    back = read_trace(path)
    assert back.is_cut and [step.at_ms for step in back.steps] == [0.0, 1.0, 2.0, 3.0, 4.0]
    path.write_bytes(whole)
    assert not read_trace(path).is_cut


def test_the_sink_writes_everything_in_order_in_its_own_thread(tmp_path: Path) -> None:
    sink = ThreadSink(tmp_path / "t.jsonl.gz")
    sink.write(header())
    for i in range(200):
        sink.write(Step(at_ms=float(i)))
    sink.close()
    back = read_trace(tmp_path / "t.jsonl.gz")
    assert [step.at_ms for step in back.steps] == [float(i) for i in range(200)] and not back.is_cut


def test_columns_that_a_later_release_adds_to_timings_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, trace_of([[1]]))
    first = json.loads(path.read_text().splitlines()[0])
    first["timing"], first["news"] = [*first["timing"], "moon_phase"], 1
    timing = "[1,1,0,0,1,2.5,true,0,0,0,0.5,7]"
    step = f'{{"kind":"step","at_ms":1,"ask_ms":0,"views":0,"timing":{timing},"verified":[],"drafts":[]}}'
    path.write_text(json.dumps(first) + "\n" + step + "\n")
    assert read_trace(path).steps[0].timing.step_ms == 2.5


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, recorded, render_refusals, monkeypatch) -> None:
    good = [encode(header()).decode(), encode(Step(at_ms=1.0)).decode()]
    tree_line = encode(Step(at_ms=1.0, candidates=(Candidates.of(0, 1, tree([1, 2], [-1, 0])),))).decode()

    def read(name: str, text: str | bytes):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return lambda: read_trace(path)

    other = json.loads(good[0]) | {"version": 9}
    cases = {
        "no such file": lambda: read_trace(tmp_path / "none.jsonl"),
        "an empty file": read("empty.jsonl", ""),
        "a text": read("text.jsonl", "hello\n"),
        "another JSON": read("other.jsonl", '{"version": 1}\n'),
        "another version": read("version.jsonl", json.dumps(other) + "\n"),
        "a plain file that claims to be packed": read("plain.jsonl.gz", good[0] + "\n"),
        "a plain file that claims to be packed with zstd": read("plain.jsonl.zst", good[0] + "\n"),
        "a damaged line": read("damaged.jsonl", "\n".join([*good, good[1][:20], good[1], ""])),
        "an unknown record": read("unknown.jsonl", good[0] + '\n{"kind":"dream"}\n'),
        "a draft with columns of different lengths": read(
            "columns.jsonl", good[0] + "\n" + tree_line.replace("[1,2],[-1,0]", "[1,2],[-1]") + "\n"
        ),
        "a folder that does not exist": lambda: write_trace(tmp_path / "no" / "t.jsonl", trace_of([[1]])),
    }
    text = render_refusals(cases, {str(tmp_path): "[TMP]"})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    text += "\n" + render_refusals(
        {"zstd without its package": lambda: write_trace(tmp_path / "t.jsonl.zst", trace_of([[1]]))},
        {str(tmp_path): "[TMP]"},
    )
    assert text == recorded(Path(__file__).with_name("refusals.txt"), text)


def test_requests_out_of_order_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    arrival = Arrival(request=3, step=0, num_prompt_tokens=1, max_tokens=1)
    path.write_bytes(encode(header()) + b"\n" + encode(arrival) + b"\n")
    with pytest.raises(TraceError, match="line 2 .* counted in order"):
        read_trace(path)
