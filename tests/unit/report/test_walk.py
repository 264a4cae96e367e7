import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.observe.engine import Rollout
from tests.unit.replay.builders import ListSink, header, trace_of, tree
from tests.unit.report import pages
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.replay.recorder import Recorder
from vllm_specrollout.replay.records import Candidates, End, Step, Trace, TraceError, Verified
from vllm_specrollout.report.rollouts import rollouts_of, steps_of
from vllm_specrollout.report.walk import Walk, walk

# the runner, and whether a step's record comes after the plan of the next one
ORDERS = [("v1", True), ("v2", False), ("v2", True)]


def recorded(answers: dict[str, list[int]], order: tuple[str, bool], pauses: frozenset[int]) -> tuple[Rollout, Trace]:
    sink = ListSink()
    rollout = Rollout(answers, Listener(), order[1], pauses=pauses)
    rollout.listener = Recorder(header(len(answers), runner=order[0], drafters=("ngram",)), sink, rollout.clock)
    return rollout.run(), pages.trace_of(sink)


def walked(answers: list[list[int]], steps: Sequence[Step], **changes: Any) -> Walk:
    """The walk of answers of which these steps were recorded."""
    return walk(dataclasses.replace(trace_of(answers, batch=len(answers)), steps=tuple(steps), **changes))


def rows_of(table: Walk, request: int) -> list[dict[str, Any]]:
    own = range(table.start[request], table.start[request + 1])
    names = ("step", "gained", "nodes", "accepted", "tree")
    return [{name: int(getattr(table, name)[k]) for name in names} | {"why": table.reasons[table.why[k]]} for k in own]


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    order=st.sampled_from(ORDERS),
    pauses=st.frozensets(st.integers(1, 20)),
)
def test_rows_are_what_the_engine_did_in_each_step(lengths, order, pauses):
    answers = {f"r{i}": [1000 * i + k for k in range(length)] for i, length in enumerate(lengths)}
    rollout, trace = recorded(answers, order, pauses)
    table = walk(trace)
    count = len(rollout.nodes)
    assert np.bincount(table.step, table.nodes, count).tolist() == rollout.nodes
    assert np.bincount(table.step, table.accepted, count).tolist() == rollout.accepted
    assert np.bincount(table.owner, table.gained).tolist() == lengths
    for request, length in enumerate(lengths):
        rows = rows_of(table, request)
        # all were there at once, and a request runs in every step until it has all its tokens
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert rows[0]["why"] == "prompt" and all(row["gained"] >= 1 for row in rows)
        assert all(row["gained"] <= row["accepted"] + 1 for row in rows)
        assert sum(row["gained"] for row in rows[:-1]) < length
        for row in rows[1:]:
            is_paused = row["step"] in pauses
            assert (row["why"] == "drafting paused: drafts do not pay") == is_paused, row
            assert is_paused or row["why"] in ("fixed", "nothing proposed")
            assert (row["why"] == "fixed") == (row["nodes"] > 0) == (row["tree"] >= 0)
    assert [table.reasons[why] for why in table.step_why[1:count]] == [
        "drafting paused: drafts do not pay" if i in pauses else "fixed" for i in range(1, count)
    ]


def test_a_rollout_has_the_figures_of_a_count_by_hand():
    rollout, trace = recorded({"a": list(range(30)), "b": list(range(50, 59))}, ("v2", False), frozenset({3}))
    table = walk(trace)
    (one,) = rollouts_of(trace, table, steps_of(trace, table))
    assert (one.requests, one.tokens, one.most_running) == (2, 39, 2)
    assert (one.verified, one.accepted) == (sum(rollout.nodes), sum(rollout.accepted))
    assert one.steps_off == rollout.nodes.count(0) and one.behind == len(rollout.nodes)
    rows = [row for request in (0, 1) for row in rows_of(table, request)]
    assert one.decoded == sum(row["gained"] for row in rows if row["why"] != "prompt") == 37
    assert one.decoding == len(rows) - 2
    # each step takes ten milliseconds
    assert one.end - one.begin == pytest.approx(10.0 * len(rollout.nodes), abs=1.5)
    assert one.verified_by == [sum(rollout.nodes)] and one.accepted_by == [sum(rollout.accepted)]
    assert one.proposed_by[0] >= one.verified


def test_figures_by_context_are_those_of_the_rows_that_have_it():
    _, trace = recorded({"a": list(range(30)), "b": list(range(50, 59))}, ("v2", False), frozenset({3}))
    table = walk(trace)
    (one,) = rollouts_of(trace, table, steps_of(trace, table))
    by_hand = defaultdict(lambda: np.zeros(4, int))
    for request in (0, 1):
        context = trace.arrivals[request].num_prompt_tokens
        for row in rows_of(table, request):
            if row["why"] != "prompt":
                by_hand[1 << (context.bit_length() - 1)] += 1, row["gained"], row["nodes"], row["accepted"]
            context += row["gained"]
    assert one.by_context == [(least, *sums) for least, sums in sorted(by_hand.items())]
    assert len(one.by_context) > 1 and sum(accepted for *_, accepted in one.by_context) == one.accepted > 0


def test_the_tail_begins_where_fewer_than_half_as_many_run_as_at_most():
    answers = {str(i): list(range(100 * i, 100 * i + length)) for i, length in enumerate((4, 4, 4, 30, 60))}
    _, trace = recorded(answers, ("v2", False), frozenset(range(99)))
    table = walk(trace)
    (one,) = rollouts_of(trace, table, steps_of(trace, table))
    # five run for 4 steps, then two
    assert one.tail == pytest.approx(one.begin + 40.0, abs=1.5)


def test_rollouts_are_told_apart_where_nobody_runs_and_nobody_waits():
    one = pages.made_up(20, 4, 30.0, seed=1)
    shift = len(one.steps)
    arrivals = [*one.arrivals, *(_moved(a, 20, shift) for a in one.arrivals)]
    late = [_later(step, 20, one.steps[-1].at_ms + 5000.0) for step in one.steps]
    ends = one.ends | {
        i + 20: End(request=i + 20, status="finished", token_ids=e.token_ids) for i, e in one.ends.items()
    }
    trace = Trace(one.header, tuple(arrivals), (*one.steps, *late), ends)
    table = walk(trace)
    first, second = rollouts_of(trace, table, steps_of(trace, table))
    assert (first.first, first.behind, second.behind) == (0, shift, 2 * shift)
    assert first.requests == second.requests == 20 and first.tokens == second.tokens
    assert first.accepted_by == second.accepted_by and first.verified == second.verified
    # nobody ran for five seconds, which belong to neither
    assert first.end - first.begin == pytest.approx(second.end - second.begin, rel=1e-6)
    assert second.begin - first.end == pytest.approx(5000.0, abs=1e-3)


def _moved(arrival, by, step):
    return msgspec.structs.replace(arrival, request=arrival.request + by, step=arrival.step + step)


def _later(step, by, ms):
    verified = tuple(Verified(one.request + by, one.drafted, one.accepted) for one in step.verified)
    drafts = tuple(msgspec.structs.replace(one, request=one.request + by) for one in step.candidates)
    return msgspec.structs.replace(step, at_ms=step.at_ms + ms, verified=verified, candidates=drafts)


def test_a_request_that_was_preempted_has_no_row_for_the_steps_it_missed():
    draft = tree([5], [-1])
    steps = [Step(at_ms=float(i), views=1) for i in range(8)]
    # it has 1, 2, 3 tokens, then nothing for two steps, as the drafts say; then goes on
    for i, position in enumerate((1, 2, 3, 3, 3, 4)):
        steps[i] = Step(at_ms=float(i), views=1, candidates=(Candidates.of(0, position, draft),))
    table = walked([[9, 9, 9, 9, 9, 9]], steps)
    assert [row["step"] for row in rows_of(table, 0)] == [0, 1, 2, 5, 6, 7]


def test_a_draft_of_which_nothing_was_verified_was_left_out_where_others_were_not():
    draft = tree([5, 6], [-1, 0])
    both = tuple(Candidates.of(i, 1, draft) for i in (0, 1))
    steps = (
        Step(at_ms=1.0, views=3, reason="goodput", candidates=both),
        Step(at_ms=2.0, verified=(Verified(0, 2, 2),), sources=(2,)),
    )
    table = walked([[1, 5, 6, 7], [1, 2, 3, 4], [1, 2, 3]], steps)
    assert [rows_of(table, i)[1]["why"] for i in range(3)] == ["goodput", "left out", "nothing proposed"]
    assert table.accepted_by.sum() == 2 and table.proposed_by.sum() == 4


def test_accepted_nodes_are_counted_for_the_drafter_that_proposed_them():
    # 5 (drafter 0) -> 6 (drafter 1) -> 7 (drafter 1), and 8 (drafter 0) beside 6
    draft = Candidates(0, 1, [5, 6, 8, 7], [-1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1])
    steps = (Step(at_ms=1.0, views=1, candidates=(draft,)), Step(at_ms=2.0, verified=(Verified(0, 4, 3),)))
    table = walked([[1, 5, 6, 7, 9]], steps)
    assert table.accepted_by.tolist() == [[0, 0], [1, 2]] and table.proposed_by.tolist() == [[0, 0], [2, 2]]


def test_a_request_without_an_end_runs_to_the_end_of_the_file():
    table = walked([[1, 2, 3]], [Step(at_ms=float(i)) for i in range(50)], ends={})
    assert table.gained.sum() == 50


def test_a_draft_that_was_verified_for_an_answer_that_had_ended_is_counted_and_yields_nothing():
    steps = (
        Step(at_ms=1.0, views=1, candidates=(Candidates.of(0, 2, tree([5, 6], [-1, 0])),)),
        Step(at_ms=2.0, verified=(Verified(0, 2, 2),)),
    )
    table = walked([[1, 2]], steps)
    assert table.gained.tolist() == [2, 0] and table.nodes.tolist() == [0, 2]


def test_a_draft_is_counted_that_was_verified_where_the_picture_took_its_request_for_over():
    drafts = (Candidates.of(0, 2, tree([5, 6], [-1, 0])),)
    steps = (
        Step(at_ms=1.0),
        # it was preempted, of which the picture knows nothing: it counts a token for each step
        Step(at_ms=2.0),
        Step(at_ms=3.0, views=1, candidates=drafts),
        Step(at_ms=4.0, views=1, candidates=drafts, verified=(Verified(0, 2, 0),)),
    )
    table = walked([[1, 2]], steps)
    assert table.nodes.tolist() == [0, 0, 2]


def test_a_record_of_a_request_that_never_came_is_refused():
    with pytest.raises(TraceError, match="speaks of request 7, and 1 have arrived"):
        walked([[1, 2, 3]], [Step(at_ms=0.0), Step(at_ms=1.0, verified=(Verified(7, 1, 1),))])


def test_more_steps_of_requests_than_memory_has_room_for_are_refused(monkeypatch):
    monkeypatch.setattr("vllm_specrollout.report.walk.MOST_ROWS", 10)
    with pytest.raises(TraceError, match="more than 10 steps of requests"):
        walk(pages.made_up(5, 2, 20.0))
