"""Both benchmarks, end to end, on a tiny model: engines start, outputs are identical, reports are complete."""

import json

import pytest
import typer
from bench.engine.command import bench_engine
from bench.rollout.command import bench_rollout
from typer.testing import CliRunner

from bench.policy.random_model import make_random_model
from bench.runner.engine_process import EngineFailed, EngineProcess, EngineSpec

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_random_model(folder, size="1M", hidden=64, num_layers=2, dtype="float32")


def run(function, *arguments):
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_trees_and_chains_of_the_oracle_are_identical_to_stock_and_take_fewer_steps(model, tmp_path):
    report = tmp_path / "report.json"
    flags = ["--model", model, "--dtype", "float32", "--batch", "1,3", "--draft", "2,6", "--tokens", 24]
    result = run(bench_engine, *flags, "--accuracy", "0.7,0.3", "--shape", "both", "--repeats", 1, "--json", report)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert [(row["batch"], row["name"], row["draft"]) for row in rows] == [
        (batch, name, draft) for batch in (1, 3) for name in ("chain", "tree") for draft in (2, 6)
    ]
    for row in rows:
        assert row["identical"]
        assert row["steps"] < row["stock_steps"] == 24
        assert row["tokens_per_step"] > 1.0
        assert row["nodes_per_step"] <= row["draft"]
        assert min(row["speedup"], row["ideal"], row["efficiency"], row["makespan_s"]) > 0.0
        assert set(row["stock_step_ms"]) == {"1", "3", "7"}


def test_off_path_nothing_is_drafted_and_both_plugin_states_are_identical_to_stock(model, tmp_path):
    report = tmp_path / "report.json"
    flags = ["--model", model, "--dtype", "float32", "--batch", "2", "--tokens", 12, "--repeats", 1]
    result = run(bench_engine, *flags, "--off-path", "--json", report)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["name"] for row in rows] == ["installed, off", "on, no drafts"]
    for row in rows:
        assert row["identical"]
        assert row["steps"] == row["stock_steps"] == 12
        assert (row["ideal"], row["nodes_per_step"]) == (1.0, 0.0)


def test_a_rollout_is_identical_to_stock_is_drawn_and_explains_its_slowest_requests(model, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    flags = ["--model", model, "--dtype", "float32", "--prompts", 3, "--samples", 2, "--batch", 4, "--max-tokens", 48]
    flags += ["--budget", "fixed", "--max-draft-tokens", 4, "--rounds", 1, "--explain", "--explain-requests", 6]
    result = run(bench_rollout, *flags, "--json", report, "--plot", picture, "--show-samples", 2)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    body = json.loads(report.read_text())
    (row,) = body["rows"]
    assert row["identical"]
    assert row["num_requests"] == 6
    assert 0.0 <= body["mean_reward"] <= 1.0
    assert len(body["samples"]) == 2
    check_explained(body["explained"], row, result.output)


def check_explained(explained, row, output):
    """Six requests of six: all that was drafted and yielded is told, and nothing else."""
    assert sum(one["num_tokens"] for one in explained) == row["output_tokens"]
    steps = nodes = 0
    for one in explained:
        stretches = one["stretches"]
        assert (stretches[0]["first"], stretches[-1]["end"]) == (1, one["num_tokens"])
        assert all(a["end"] == b["first"] for a, b in zip(stretches, stretches[1:], strict=False))
        assert 0.0 < stretches[0]["begin_s"] < stretches[-1]["end_s"] <= one["finish_s"] + 1.0
        assert {"fixed", "nothing proposed", "nothing to draft"} >= {name for s in stretches for name in s["reasons"]}
        steps += sum(sum(s["reasons"].values()) for s in stretches)
        nodes += sum(s["nodes"] for s in stretches)
    assert nodes / steps == pytest.approx(row["nodes_per_step"])
    finished = [one["finish_s"] for one in explained]
    assert finished == sorted(finished, reverse=True)
    assert "slowest 1: " in output and "slowest 6: " in output


def test_an_engine_that_cannot_start_says_why(model):
    spec = EngineSpec(
        name="spec rollout", arguments={"model": str(model)}, has_plugin=True, spec_rollout={"drafter": 1}
    )
    with pytest.raises(EngineFailed) as caught:
        EngineProcess(spec)
    assert caught.value.cause == (
        "the spec rollout engine failed: ConfigError: unknown key `drafter` in `spec_rollout`"
    )
    assert caught.value.hint == "did you mean `drafters`?"
