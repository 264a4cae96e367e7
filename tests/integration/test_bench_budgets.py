"""Sweep and ramp, end to end, on a tiny model."""

import json

import pytest
import typer
from bench.ramp.command import bench_ramp
from bench.sweep.command import bench_sweep
from typer.testing import CliRunner

from bench.policy.random_model import make_random_model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_random_model(folder, size="1M", hidden=64, num_layers=2, dtype="float32")


def rows_of(function, model, tmp_path, *flags):
    app, report = typer.Typer(), tmp_path / "report.json"
    app.command()(function)
    arguments = ["--model", model, "--dtype", "float32", "--rounds", 1, "--json", report, *flags]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(report.read_text())["rows"]


def test_every_cell_of_a_sweep_is_identical_to_stock_and_drafts_as_told(model, tmp_path):
    flags = ("--batch", "1,3", "--accuracy", "0.9", "--draft", "1,3", "--tokens", 12)
    rows = rows_of(bench_sweep, model, tmp_path, *flags)
    assert {(row["batch"], row["name"]) for row in rows} == {(b, n) for b in (1, 3) for n in ("auto", "fixed")}
    for row in rows:
        assert row["identical"]
        assert row["name"] == "auto" or 0.0 < row["nodes_per_step"] <= row["draft"]
        assert (row["auto_to_best"] is not None) == (row["name"] == "auto")


def test_every_pattern_is_identical_to_stock_and_off_never_drafts(model, tmp_path):
    rows = rows_of(bench_ramp, model, tmp_path, "--budget", "off,fixed", "--requests", 9, "--tokens", 12)
    assert [row["name"] for row in rows] == ["auto", "off", "fixed"] * 5
    for row in rows:
        assert row["identical"]
        assert row["name"] != "off" or (row["steps_on"], row["switches"]) == (0, 0)
        assert row["name"] != "fixed" or row["steps_off"] == 0
