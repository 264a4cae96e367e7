"""The commands refuse what makes no sense, and tell no speed of outputs that differ."""

import json

import pytest
import typer
from typer.testing import CliRunner

from bench.runner.report import Found
from bench.runner.rows import Pair, make_row
from bench.scenarios import decode, load, rollout, sweep
from vllm_specrollout.errors import SpecRolloutError


def run(function, *arguments):
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder


@pytest.fixture
def bench_that_finds(monkeypatch):
    """The engine benchmark with its engines replaced by a row."""

    def install(row):
        monkeypatch.setattr(decode.Decode, "measure", lambda *_: Found(model="m", rows=[row]))

    return install


def test_identical_outputs_end_with_status_0_and_a_report(model, tmp_path, bench_that_finds, make_run):
    fast, slow = make_run([[1, 2]], [0.5, 1.0]), make_run([[1, 2]], [2.0, 4.0])
    bench_that_finds(make_row("chain", 1, 3, [Pair(stock=slow, ours=fast)]))
    result = run(decode.bench_engine, "--model", model, "--out", tmp_path / "report.json")
    assert result.exit_code == 0
    assert "4.00x" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["speedup"] == 4.0


def test_outputs_that_differ_end_with_status_1_and_no_speed(model, tmp_path, bench_that_finds, make_run):
    fast, slow = make_run([[1, 3]], [0.5, 1.0]), make_run([[1, 2]], [2.0, 4.0])
    bench_that_finds(make_row("chain", 1, 3, [Pair(stock=slow, ours=fast)]))
    result = run(decode.bench_engine, "--model", model, "--out", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "request 0, token 1: stock 2, ours 3" in result.stdout
    row = json.loads((tmp_path / "report.json").read_text())["rows"][0]
    assert row["identical"] is False
    assert row["speedup"] is row["makespan_s"] is row["rounds_s"] is None


@pytest.mark.parametrize(
    ("function", "arguments", "cause"),
    [
        (decode.bench_engine, ["--size", "3M", "--model", "x"], "`--size` and `--model` are both given"),
        (decode.bench_engine, ["--model", "x"], "`--model` is `x`, which holds no config.json"),
        (decode.bench_engine, ["--out", "no/where.json"], "`--out` is `no/where.json`, whose folder does not exist"),
        (decode.bench_engine, ["--draft", "65"], "`--draft` holds 65, outside 1 to 64"),
        (rollout.bench_rollout, ["--model", "x"], "`--model` is `x`, which holds no config.json"),
        (rollout.bench_rollout, ["--show-samples", "65"], "`--show-samples` is 65, outside 0 to 64"),
        (sweep.bench_sweep, ["--accuracy", "0.5,0.5"], "`--accuracy` is '0.5,0.5', which holds a value twice"),
        (load.bench_ramp, ["--pattern", "tail"], "`--pattern` is 'tail', which does not exist"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(function, arguments, cause):
    result = run(function, *arguments)
    assert isinstance(result.exception, SpecRolloutError)
    assert result.exception.cause == cause


def test_an_answer_too_long_for_the_model_is_refused(model):
    result = run(decode.bench_engine, "--model", model, "--tokens", 4096)
    assert result.exception.cause == "prompts and answers take up to 4864 tokens, and the model at most 4096"
