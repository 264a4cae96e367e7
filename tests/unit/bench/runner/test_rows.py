"""Rows are ratios of paired runs, and a row whose outputs differ has no speed."""

import dataclasses
import json

import pytest

from bench.runner.report import SCHEMA, Found, as_json
from bench.runner.rows import SPEEDS, Pair, Run, WorkerTotals, at, first_difference, make_row, quartiles, step_times


@pytest.fixture
def make_pair(make_run):
    """9 tokens: stock in 9 steps of a second; ours in a prompt step and 2 verify steps of 3 nodes, all accepted."""

    def make(ours_s=3.0, tokens=range(9), **others):
        stock = make_run([range(9)], [float(i) for i in range(1, 10)])
        totals = {"steps": 3, "request_steps": 3, "drafted": 6, "accepted": 6, "forward_ms": 1500.0}
        ours = make_run([tokens], [ours_s / 3, 2 * ours_s / 3, ours_s], **totals)
        return Pair(stock=stock, ours=ours, **others)

    return make


def test_speedup_is_the_ratio_of_makespans_and_efficiency_its_share_of_the_ideal(make_pair):
    row = make_row("chain", 1, 3, [make_pair()], {1: 1000.0, 4: 1250.0})
    assert row.identical
    assert row.speedup == 3.0
    assert row.tokens_per_step == 4.0
    assert row.nodes_per_step == 3.0
    assert row.ideal == 4.0 * 1000.0 / 1250.0
    assert row.efficiency == pytest.approx(3.0 / 3.2)
    assert row.decode_speedup == pytest.approx(8.0 / 2.0)
    assert row.verified_per_accepted == 1.0
    assert (row.stock_steps, row.steps) == (9, 3)
    assert row.overhead_ms_per_step == (3000.0 - 1500.0) / 3


def test_speedup_is_the_median_over_timed_rounds_beside_its_quartiles(make_pair):
    rounds = (9.0, 2.25, 3.0, 4.5, 1.8)
    row = make_row("chain", 1, 3, [make_pair(900.0, is_timed=False), *map(make_pair, rounds)])
    assert (row.speedup, row.speedup_quartiles, row.makespan_s) == (3.0, (2.0, 4.0), 3.0)
    assert row.rounds_s == [[9.0, one] for one in rounds]
    assert quartiles([7.0]) == (7.0, 7.0)


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_row_whose_outputs_differ_tells_where_and_no_speed_also_by_its_warm_up(make_pair, is_timed):
    wrong = make_pair(tokens=[0, 1, 2, 3, 77, 5, 6, 7, 8], is_timed=is_timed)
    row = make_row("chain", 1, 3, [make_pair(), wrong], {1: 1.0, 4: 1.0})
    assert not row.identical
    assert row.difference == "request 0, token 4: stock 4, ours 77"
    assert {name: getattr(row, name) for name in SPEEDS} == dict.fromkeys(SPEEDS)
    assert row.tokens_per_step == 4.0


def test_an_engine_without_drafts_has_an_ideal_of_one(make_run):
    run = make_run([range(3)], [1.0, 2.0, 3.0])
    row = make_row("installed, off", 1, 0, [Pair(stock=run, ours=run)], {1: 1000.0})
    assert (row.speedup, row.ideal, row.efficiency) == (1.0, 1.0, 1.0)
    assert row.overhead_ms_per_step is None


def test_drafts_that_are_never_accepted_have_no_verified_per_accepted(make_run):
    run = make_run([range(3)], [1.0, 2.0, 3.0], steps=3, request_steps=3, drafted=4, forward_ms=1.0)
    row = make_row("chain", 1, 2, [Pair(stock=run, ours=run)], {1: 1.0, 3: 2.0})
    assert row.verified_per_accepted is None
    assert row.ideal == 1.0 / 2.0


def test_the_report_is_json_with_a_schema_number_and_the_promised_fields(make_pair):
    row = make_row("chain", 1, 3, [make_pair()], {1: 1000.0, 4: 1250.0})
    found = Found(model="m", rows=[row], extra={"mean_reward": 1.0})
    body = json.loads(as_json("engine", {"rounds": 1}, found))
    assert body["settings"] == {"model": "m", "rounds": 1}
    assert set(body) >= {"host", "versions", "command"} and "commit" in body["versions"]
    assert body["schema"] == SCHEMA
    assert body["mean_reward"] == 1.0
    told = {name for name, value in body["rows"][0].items() if value is not None}
    assert told >= {"name", "batch", "draft", "identical", "tokens_per_step"}
    assert told >= {"speedup", "ideal", "efficiency", "makespan_s"}
    assert body["rows"][0]["stock_step_ms"] == {"1": 1000.0, "4": 1250.0}


def test_what_stock_does_not_repeat_is_compared_with_nobody(make_run):
    first, again = make_run([[1, 2]], [1.0, 2.0]), make_run([[1, 3]], [1.0, 2.0])
    itself = first_difference(first, again)
    pairs = [Pair(stock=first, ours=first), Pair(stock=dataclasses.replace(again, itself=itself), ours=again)]
    row = make_row("chain", 1, 3, pairs)
    assert not row.identical and row.speedup is None
    assert row.difference == "stock against itself: request 0, token 1: stock 2, then 3"


@pytest.mark.parametrize(
    ("stock", "ours", "told"),
    [
        ([[1], [2, 3, 4], [5]], [[1], [2, 9, 4], [6]], "request 1, token 1: stock 3, ours 9 (2 requests differ)"),
        ([[1, 2]], [[1]], "request 0, token 1: stock 2, ours None"),
    ],
)
def test_the_first_differing_token_of_the_first_differing_request_is_named(make_run, stock, ours, told):
    assert first_difference(make_run(stock, [1.0]), make_run(ours, [1.0])).as_text() == told


def test_decoding_time_leaves_out_the_step_of_the_prompts(make_run):
    run = make_run([[1, 2, 3]], [0.5, 0.6, 0.8])
    assert run.wall_s == 0.8
    assert round(run.decode_s, 9) == 0.3
    assert [round(ms) for ms in run.step_ms()] == [100, 200]


def test_what_the_worker_counts_beyond_our_fields_is_ignored():
    stats = {**dict.fromkeys(WorkerTotals.__dataclass_fields__, 2), "shape": "tree", "newer": 1}
    reply = {"token_ids": [[1]], "finish_s": [1.0], "step_s": [1.0], "wall_s": 1.0, "totals": stats}
    assert Run.from_child(reply).totals.steps == 2


def test_step_times_between_measured_points_are_linear_and_beyond_them_constant():
    times = {1: 10.0, 4: 16.0}
    assert at(times, 2) == 12.0
    assert at(times, 0.5) == 10.0
    assert at(times, 9) == 16.0


def test_admitting_requests_is_not_charged_to_wider_steps():
    # extensions cost 5 ms of admission each; a step of 4 tokens really costs 3 ms more than one of 1
    times = step_times([10.0, 10.0, 50.0], {1: [15.0, 15.0], 4: [18.0, 18.0]})
    assert times == {1: 10.0, 4: 13.0}


def test_a_wider_step_never_counts_as_cheaper():
    times = step_times([10.0], {1: [15.0], 4: [12.0], 8: [16.0]})
    assert times == {1: 10.0, 4: 10.0, 8: 11.0}


def test_one_odd_measurement_does_not_move_the_median():
    assert step_times([10.0] * 9 + [1e6], {1: [15.0]})[1] == pytest.approx(10.0)
