import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_specrollout.budgets.registry import names
from vllm_specrollout.cli.commands import app
from vllm_specrollout.errors import ConfigError
from vllm_specrollout.replay.files import read_trace

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.jsonl.zst"))


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_three_traces_of_real_rollouts_ship() -> None:
    assert [path.name.partition(".")[0] for path in TRACES] == ["early_epoch", "late_epoch", "long_tail"]
    for path in TRACES:
        trace = read_trace(path)
        assert path.stat().st_size < 300_000 and not trace.is_cut
        assert trace.header.budget == "fixed" and len(trace.ends) == len(trace.arrivals)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_every_budget_runs_on_every_shipped_trace_and_the_recorded_one_takes_the_steps_it_took(path, tmp_path) -> None:
    out = tmp_path / "rows.json"
    text = run(path, "--strategy", "all", "--out", out)
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert tuple(rows) == names()
    columns = {"name", "trace", "busy_s", "tokens_per_step", "wasted_nodes", "steps", "steps_off"}
    assert all(set(row) == columns for row in rows.values())
    assert rows["off"]["steps_off"] == rows["off"]["steps"] and rows["off"]["tokens_per_step"] == 1.0
    trace = read_trace(path)
    # the proposals are all there for the budget that was recorded, so it takes the very steps that it took
    assert abs(rows["fixed"]["steps"] - len(trace.steps)) <= 0.02 * len(trace.steps)
    assert "fixed: predicted" in text


def test_only_the_named_budgets_run_in_the_named_order(tmp_path) -> None:
    out = tmp_path / "rows.json"
    run(TRACES[0], "--strategy", "off,fixed", "--out", out, "--seed", "3")
    assert [row["name"] for row in json.loads(out.read_text())] == ["off", "fixed"]


@pytest.mark.parametrize(
    "inside, cause", [("", "which is a folder"), ("none/rows.json", "whose folder does not exist")]
)
def test_rows_that_could_not_be_written_are_refused_before_anything_is_read(tmp_path, inside, cause) -> None:
    with pytest.raises(ConfigError, match=f"^`--out` is .*, {cause}"):
        run(tmp_path / "no such trace", "--out", tmp_path / inside)


def test_a_budget_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="`--strategy` names 'autoo', which does not exist"):
        run(TRACES[0], "--strategy", "autoo")
