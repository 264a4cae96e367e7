"""What is kept of a report: medians, quartiles, and where they were measured."""

import json

from bench.runner.results import as_text, kept, reduced

HEAD = {"host": {"cpu": "x"}, "versions": {"commit": "abc", "vllm": "0.32.0"}, "command": "specrollout bench engine"}


def report(rows, bench="engine", **settings):
    return {**HEAD, "bench": bench, "settings": {"seed": 0, **settings}, "rows": rows}


def row(draft=3, **changes):
    values = {"name": "chain", "batch": 1, "draft": draft, "identical": True, "speedup": 2.0, "ideal": None}
    return {**values, "rounds_s": [[4.0, 2.0], [6.0, 2.0], [4.0, 4.0]], "stock_step_ms": {"1": 3.0}, **changes}


def test_rounds_become_quartiles_and_what_is_not_told_is_left_out():
    (found,) = reduced(report([row()]))["rows"]
    assert found == {
        **{"name": "chain", "batch": 1, "draft": 3, "identical": True, "speedup": 2.0, "rounds": 3},
        "speedup_quartiles": [1.5, 2.5],
    }


def test_a_row_whose_outputs_differ_keeps_the_difference_and_gets_no_speed():
    (found,) = reduced(report([row(identical=False, speedup=None, rounds_s=None, difference="request 0")]))["rows"]
    assert (found["identical"], found["difference"]) == (False, "request 0")
    assert not {"speedup", "speedup_quartiles", "rounds"} & set(found)


def test_command_commit_and_host_are_kept():
    run = reduced(report([row()]))
    assert (run["command"], run["commit"], run["host"], run["vllm"]) == (
        *("specrollout bench engine", "abc", {"cpu": "x"}),
        "0.32.0",
    )


def test_an_rl_loop_is_kept_as_its_epochs():
    engine = {"engine": "ours", "wall_s": 1.23456789, "steps": 3, "speedup": None}
    found = reduced({**report([]), "bench": "grpo", "epochs": [{"epoch": "1", "reward": 0.5, "engines": [engine]}]})
    assert found["rows"] == [{"epoch": "1", "reward": 0.5, "engine": "ours", "wall_s": 1.23457, "steps": 3}]


def test_a_file_reads_back_and_has_a_line_per_row():
    body = kept([report([row(3), row(7)])])
    assert json.loads(as_text(body)) == body
    assert sum('"name": "chain"' in line for line in as_text(body).splitlines()) == 2


def test_of_a_gpu_what_is_right_is_kept_with_its_times_and_what_is_wrong_without():
    times = {"ours": {"median_us": 3.0, "low_us": 2.0, "high_us": 4.0, "samples": 25}}
    shared = {"name": "verify", "times": times, "checked": "x"}
    rows = [{**shared, "passed": True}, {**shared, "passed": False}]
    runs = [{"step": "kernels", "report": {"rows": rows}}, {"step": "checks", "report": {}}]
    right, wrong = reduced({**HEAD, "bench": "gpu first hour", "runs": runs})["rows"]
    assert right == {"step": "kernels", "name": "verify", "passed": True, "times": times}
    assert wrong == {"step": "kernels", "name": "verify", "passed": False}
