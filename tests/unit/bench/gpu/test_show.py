"""What is printed of rows: speeds only beside their checks, failures by their first line, the overview last."""

import io
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from bench.gpu import parts, show
from bench.gpu.engine_rows import split
from bench.gpu.parts import Options
from bench.gpu.record import Row
from bench.runner.rows import Pair, make_row


def row(step, name, params, **values):
    state = values.pop("state", "done")
    made = Row(key=name, step=step, name=name, params=params, identity={}, state=state, attempts=1, seconds=1.0)
    made.is_right, made.error = values.pop("is_right", None), values.pop("error", "")
    made.values = values
    return made


def printed(rows, notes=(), is_dry=False):
    out = Console(file=io.StringIO(), width=150)
    options = Options(work=Path("w"), is_dry=is_dry)
    show.everything(out, options, parts.parts(options), rows, list(notes))
    return out.file.getvalue()


@pytest.fixture
def speed(make_run):
    slow, fast, wrong = (
        make_run([[1, 2]], [2.0, 4.0]),
        make_run([[1, 2]], [0.5, 1.0]),
        make_run([[1, 3]], [0.5, 1.0]),
    )

    def made(run, **values):
        shared = {"parted": 0, "stale": 0, "step_ms": 500.0, "stock_step_ms": 2000.0, "split": {"wait_ms": 0.25}}
        ratio = asdict(make_row("chain", 1, 7, [Pair(stock=slow, ours=run)]))
        return {"checked": "every token", "row": ratio, **shared, **values}

    return made(fast, is_right=True), made(wrong, is_right=False, parted=1, step_ms=None, split=None)


def test_a_speed_is_printed_beside_its_check_and_not_at_all_where_that_fails(speed):
    right, wrong = speed
    text = printed([row("speed", "chain, 4 a step, 1 x 1024", {"kind": "speed"}, **right)])
    assert text.count("4.00x") == 2 and "0 parted" in text and "0.25" in text
    text = printed([row("speed", "chain, 4 a step, 1 x 1024", {"kind": "speed"}, **wrong)])
    assert "4.00x" not in text and "1 parted" in text
    assert "WRONG speed, chain, 4 a step, 1 x 1024: every token request 0, token 1: stock 2, ours 3" in text


def test_a_failure_is_told_by_its_first_line_and_counted():
    text = printed([row("checks", "doctor", {"kind": "doctor"}, state="failed", error="ValueError: no\nmore")])
    assert "FAILED checks, doctor: ValueError: no\n" in text and "more" not in text
    line = next(line for line in text.splitlines() if line.startswith("checks"))
    # planned, right, wrong, measured, failed
    assert line.split()[2:6] == ["0", "0", "0", "1"]


def test_the_overview_stands_last_and_a_dry_walk_says_what_it_is():
    rows = [row("kernels", "commit 7B", {"kind": "commit"}, times={"ours": TIME}, roof_us=4.0, notes=["a note"])]
    text = printed(rows, notes=["a note of the start"], is_dry=True)
    assert text.splitlines()[0].startswith("A DRY WALK")
    assert text.rstrip().splitlines()[-1].startswith("speed")
    assert "note: commit 7B: a note" in text and "note: a note of the start" in text
    assert "12.0 ±2.0" in text


TIME = {"median_us": 12.0, "low_us": 10.0, "high_us": 14.0, "samples": 25}


def test_our_kernel_is_compared_with_flash_attention_as_vllm_calls_it_in_graphs():
    times = {"ours": TIME, "fa3 graph": {**TIME, "median_us": 8.0}, "fa3 auto": {**TIME, "median_us": 6.0}}
    assert show.over_flash(times) == 1.5
    assert show.over_flash({"ours": TIME}) is None


def test_ties_are_told_by_the_worst_of_them():
    def identity(*gaps):
        partings = [{"gap": gap, "request": 0, "position": 3, "stock": 1, "ours": 2} for gap in gaps]
        counts = {"compared": 64, "ties": len(gaps), "steps": 10, "checked": "every token"}
        return row("graphs", "tree, 8 x 1024", {"kind": "identity"}, partings=partings, is_right=True, **counts)

    assert "0.1" in printed([identity(0.05, 0.1)])
    assert "unknown" in printed([identity(0.05, None)])


def test_the_workers_totals_are_told_per_step():
    assert split({"steps": 4, "draft_ms": 2.0, "by_rows": {}, "shape": "tree"}) == {"steps": 4, "draft_ms": 0.5}
    assert split({"steps": 0}) == {}


def test_a_figure_that_was_not_measured_is_a_dash():
    assert show.us(None) == show.number(None) == "-"
