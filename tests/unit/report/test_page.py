import base64
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.replay.builders import header, trace_of
from tests.unit.report.pages import islands, made_up
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay.records import Arrival, End, Step, Trace, TraceError, Verified
from vllm_specrollout.report.page import PARTS, page_of
from vllm_specrollout.report.walk import walk

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.jsonl.zst"))


def naive(trace):
    """request -> [(step, tokens gained, nodes, accepted)]: of a recording in which nobody was preempted."""
    lengths = {i: len(end.token_ids) for i, end in trace.ends.items()}
    told = [{one.request: (one.drafted, one.accepted) for one in step.verified} for step in trace.steps]
    found = {}
    for arrival in trace.arrivals:
        position, step, rows = 1, arrival.step, [(arrival.step, 1, 0, 0)]
        while position < lengths[arrival.request]:
            step += 1
            nodes, accepted = told[step].get(arrival.request, (0, 0))
            gained = min(1 + accepted, lengths[arrival.request] - position)
            rows.append((step, gained, nodes, accepted))
            position += gained
        found[arrival.request] = rows
    return found


@pytest.fixture(scope="module", params=[*TRACES, None], ids=lambda path: "made up" if path is None else path.stem)
def drawn(request):
    """A trace, and the data of its page."""
    trace = made_up(150, 16, 40.0, seed=3) if request.param is None else read_trace(request.param)
    return trace, islands(page_of(trace, "x.jsonl"))


def test_columns_are_those_that_a_count_of_the_records_finds(drawn):
    trace, data = drawn[0], drawn[1]["summary"]
    rows = naive(trace)
    columns = data["requests"]
    for i, own in rows.items():
        step, gained, nodes, accepted = zip(*own, strict=True)
        assert columns["tokens"][i] == sum(gained) == len(trace.ends[i].token_ids)
        assert columns["steps"][i] == len(own) and columns["drafted"][i] == sum(n > 0 for n in nodes)
        assert (columns["first"][i], columns["last"][i]) == (step[0], step[-1])
        assert (columns["verified"][i], columns["accepted"][i]) == (sum(nodes), sum(accepted))
        assert columns["problems"][columns["problem"][i]] == trace.arrivals[i].problem_id
        assert columns["statuses"][columns["status"][i]] == trace.ends[i].status
    steps = data["steps"]
    for name, place in (("tokens", 1), ("nodes", 2), ("accepted", 3)):
        sums = [0] * len(trace.steps)
        for own in rows.values():
            for row in own:
                sums[row[0]] += row[place]
        assert steps[name] == sums
    assert sum(one["tokens"] for one in data["rollouts"]) == sum(columns["tokens"])


def test_an_answer_is_marked_as_looping_if_it_repeats_itself_and_its_drafts_hold_far_more_often_than_others():
    loop, plain = [5, 6, 7] * 20, list(range(100, 160))
    answers = [loop, plain, loop, plain, plain]
    # of 8 nodes in each step
    hits = {0: 7, 1: 7, 2: 3, 3: 3, 4: 3}
    verified = tuple(Verified(i, 8, most) for i, most in hits.items())
    facts = {"num_prompt_tokens": 4, "max_tokens": 100, "problem_id": "p"}
    arrivals = tuple(Arrival(request=i, step=0, **facts) for i in hits)
    steps = tuple(Step(at_ms=float(at), verified=verified if at else ()) for at in range(4))
    ends = {i: End(request=i, status="finished", token_ids=answer) for i, answer in enumerate(answers)}
    data = islands(page_of(Trace(header(5), arrivals, steps, ends), "x.jsonl"))
    # 1's drafts hold by something else than a loop; 2 loops, and nobody gains by it
    assert data["summary"]["requests"]["looping"] == [True, False, False, False, False]
    assert data["summary"]["requests"]["accepted"] == [21, 21, 9, 9, 9]
    # without an end there is no answer to look at
    data = islands(page_of(Trace(header(5), arrivals, steps, {}), "x.jsonl"))
    assert not any(data["summary"]["requests"]["looping"])


def test_how_many_run_is_what_the_engine_said(drawn):
    trace, running = drawn[0], drawn[1]["summary"]["steps"]["running"]
    rows = [row[0] for own in naive(trace).values() for row in own]
    assert running == np.bincount(rows, minlength=len(trace.steps)).tolist()
    told = [trace.timing_of(i) for i in range(len(trace.steps))]
    assert all(timing is None or timing.batch == running[i] for i, timing in enumerate(told))


def test_steps_and_trees_of_every_request_are_in_the_page_of_a_small_rollout(drawn):
    trace, data = drawn
    expected = naive(trace)
    drafts = {}
    for number, step in enumerate(trace.steps, 1):
        drafts |= {(one.request, number): one for one in step.candidates}
    requests = data["summary"]["requests"]
    assert min(requests["block"]) >= 0 and min(requests["trees"]) >= 0
    seen = set()
    for name, block in data.items():
        if not name.startswith("trees"):
            continue
        steps = data[name.replace("trees", "steps")]
        assert steps["ids"] == block["ids"]
        at, row, node, answered = np.cumsum(steps["step"]).tolist(), 0, 0, 0
        for i, length in zip(block["ids"], block["lengths"], strict=True):
            seen.add(i)
            assert block["answers"][answered : answered + length] == trace.ends[i].token_ids
            answered += length
            for own in expected[i]:
                assert (at[row], *(steps[key][row] for key in ("gained", "nodes", "accepted"))) == own
                draft, size = drafts.get((i, own[0])), block["sizes"][row]
                assert size == (0 if draft is None else len(draft.token_ids))
                if draft is not None:
                    part = slice(node, node + size)
                    assert (block["tokens"][part], block["parents"][part]) == (draft.token_ids, draft.parents)
                    assert block["sources"][part] == draft.tree.source.tolist()
                row, node = row + 1, node + size
    assert seen == set(expected)


def test_each_part_of_a_bar_has_the_mean_of_its_steps_and_their_commonest_reason(drawn):
    data, table = drawn[1]["summary"], walk(drawn[0])
    speeds, whys = (np.frombuffer(base64.b64decode(data[name]), np.uint8) for name in ("speed", "why"))
    for i in range(0, len(table.start) - 1, 7):
        own = slice(table.start[i], table.start[i + 1])
        gained, why = table.gained[own], table.why[own]
        count = min(PARTS, len(gained))
        part = np.arange(len(gained)) * count // len(gained)
        for k in range(count):
            byte = i * PARTS + k
            assert speeds[byte] == pytest.approx(min(10 * gained[part == k].mean(), 255), abs=0.51)
            counts = np.bincount(why[part == k], minlength=len(table.reasons))
            assert counts[whys[byte]] == counts.max()


def test_what_does_not_fit_is_left_out_of_the_page_trees_first_and_early_requests_before_late_ones():
    trace = made_up(150, 16, 60.0, seed=3)
    whole = page_of(trace, "x.jsonl")
    summary = islands(whole)["summary"]
    most = len(whole) * 3 // 4
    some = page_of(trace, "x.jsonl", most)
    assert len(some) <= most
    left = islands(some)["summary"]["requests"]
    assert min(left["block"]) >= 0 and min(left["trees"]) < 0 <= max(left["trees"])
    last = summary["requests"]["last"]
    kept = [last[i] for i, block in enumerate(left["trees"]) if block >= 0]
    gone = [last[i] for i, block in enumerate(left["trees"]) if block < 0]
    assert min(kept) >= max(gone)
    least = islands(page_of(trace, "x.jsonl", 1))
    assert list(least) == ["summary"] and max(least["summary"]["requests"]["block"]) == -1
    assert least["summary"]["rollouts"] == summary["rollouts"]


def test_a_page_names_no_other_file_and_no_address():
    page = page_of(made_up(8, 4, 20.0), "<b>&.jsonl")
    text = page.replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text and "@import" not in text and "src=" not in text.replace("default-src", "")
    assert "default-src 'none'" in page
    assert "<b>" not in page and "&lt;b&gt;&amp;.jsonl" in page


def test_names_out_of_the_trace_cannot_become_a_part_of_the_page():
    trace = made_up(8, 4, 20.0)
    evil = "</script><script>alert(1)</script>"
    arrivals = tuple(msgspec.structs.replace(one, problem_id=evil) for one in trace.arrivals)
    page = page_of(Trace(trace.header, arrivals, trace.steps, trace.ends), "x.jsonl")
    assert evil not in page and islands(page)["summary"]["requests"]["problems"] == [evil]


def test_two_pages_of_one_trace_are_equal():
    trace = made_up(30, 8, 30.0)
    assert page_of(trace, "x.jsonl") == page_of(trace, "x.jsonl")


def test_a_file_whose_name_is_no_text_has_a_page():
    assert "\udcff" not in page_of(made_up(4, 4, 20.0), "x\udcff.jsonl")


def test_a_trace_without_a_step_has_no_page():
    trace = trace_of([[1]])
    with pytest.raises(TraceError, match="holds no step"):
        page_of(Trace(trace.header, (), (), {}), "x.jsonl")


def test_a_trace_without_a_request_has_a_page():
    trace = trace_of([])
    summary = islands(page_of(Trace(trace.header, (), (Step(at_ms=1.0), Step(at_ms=2.0)), {}), "x.jsonl"))["summary"]
    assert summary["requests"]["tokens"] == [] and len(summary["rollouts"]) == 1
