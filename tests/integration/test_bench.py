"""Every scenario end to end through the common runner, on a tiny model; all tokens are stock's."""

import json

import pytest
import typer
from typer.testing import CliRunner

from bench.runner import engine_process
from bench.runner.engine_process import EngineFailed, EngineProcess, EngineSpec
from bench.scenarios.decode import bench_engine
from bench.scenarios.drafters import bench_drafters
from bench.scenarios.load import bench_ramp
from bench.scenarios.rollout import bench_rollout
from bench.scenarios.sweep import bench_sweep
from bench.soak.scenario import bench_soak
from tests import warm

TREES = ("--accuracy", "0.7,0.3", "--shape", "both")


@pytest.fixture(scope="module", autouse=True)
def _warm():
    with warm.engine_processes(), pytest.MonkeyPatch.context() as patch:
        # who runs beside an engine disturbs its times, which are not looked at here
        patch.setattr(engine_process, "QUIET_S", 0.0)
        yield


@pytest.fixture
def measured(model, tmp_path):
    """Run a command on the tiny model in float32: (its report, what it printed)."""

    def run(function, *flags):
        app, report = typer.Typer(), tmp_path / "report.json"
        app.command()(function)
        arguments = ["--model", model, "--dtype", "float32", "--rounds", 1, "--out", report, *flags]
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        body = json.loads(report.read_text())
        assert all(row["identical"] for row in body["rows"])
        return body, result.output

    return run


@pytest.mark.nightly
def test_oracle_drafts_take_fewer_steps_as_chains_and_as_trees(measured):
    body, _ = measured(bench_engine, *("--batch", "1,3", "--draft", "2,6", "--tokens", 24), *TREES)
    assert [(row["batch"], row["name"], row["draft"]) for row in body["rows"]] == [
        (batch, name, draft) for batch in (1, 3) for name in ("chain", "tree") for draft in (2, 6)
    ]
    for row in body["rows"]:
        assert row["steps"] < row["stock_steps"] == 24
        assert row["tokens_per_step"] > 1.0 and row["nodes_per_step"] <= row["draft"]
        assert min(row["speedup"], row["ideal"], row["efficiency"], row["makespan_s"]) > 0.0
        assert set(row["stock_step_ms"]) == {"1", "3", "7"}


@pytest.mark.nightly
def test_off_path_nothing_is_drafted_in_both_states_of_the_plugin(measured):
    body, _ = measured(bench_engine, "--batch", 2, "--tokens", 12, "--off-path")
    assert [row["name"] for row in body["rows"]] == ["installed, off", "on, no drafts", "on, paused"]
    for row in body["rows"]:
        assert row["steps"] == row["stock_steps"] == 12
        assert (row["ideal"], row["nodes_per_step"]) == (1.0, 0.0)


def test_a_rollout_tells_its_rewards_and_samples(measured):
    flags = ["--prompts", 3, "--samples", 2, "--batch", 4, "--max-tokens", 48, "--budget", "fixed"]
    flags += ["--max-draft-tokens", 4, "--show-samples", 2]
    body, _ = measured(bench_rollout, *flags)
    (row,) = body["rows"]
    assert row["num_requests"] == 6
    assert 0.0 <= body["mean_reward"] <= 1.0 and len(body["samples"]) == 2


@pytest.mark.nightly
def test_every_cell_of_a_sweep_drafts_as_told(measured):
    body, _ = measured(bench_sweep, "--batch", "1,3", "--accuracy", "0.9", "--draft", "1,3", "--tokens", 12)
    assert {(row["batch"], row["name"]) for row in body["rows"]} == {(b, n) for b in (1, 3) for n in ("auto", "fixed")}
    for row in body["rows"]:
        assert row["name"] == "auto" or 0.0 < row["nodes_per_step"] <= row["draft"]
        assert (row["auto_to_best"] is not None) == (row["name"] == "auto")


@pytest.mark.nightly
def test_a_copy_of_the_target_is_met_everywhere_and_every_arm_drafts_with_it(measured, model):
    given = {"copy": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}}
    flags = ["--drafters", json.dumps(given), "--prompts", 3, "--samples", 1, "--batch", "1,3", "--max-tokens", 24]
    body, output = measured(bench_drafters, *flags, "--temperature", "1", "--budget", "fixed")
    (met,) = body["met"]
    # an answer's first token comes with its prompt, and for its last one nothing is drafted
    assert met["positions"] == body["rows"][-1]["output_tokens"] - 2 * 3
    assert met["shared"] == 1.0 >= met["learned"] and met["overlap"] == pytest.approx(1.0, abs=1e-3)
    assert met["greedy"] < met["greedy_two"] < 1.0 and f"{met['greedy']:.2f}" in output
    arms = ["greedy", "shared noise", "comb", "union"]
    assert [row["name"] for row in body["rows"]] == [f"copy, {arm}" for _ in (1, 3) for arm in arms]
    steps = {row["name"]: row["steps"] for row in body["rows"] if row["batch"] == 3}
    assert steps["copy, shared noise"] < steps["copy, greedy"] < body["rows"][-1]["stock_steps"]


@pytest.mark.nightly
def test_under_every_load_off_never_drafts_and_fixed_always_does(measured):
    body, _ = measured(bench_ramp, "--budget", "off,fixed", "--requests", 9, "--tokens", 12)
    assert [row["name"] for row in body["rows"]] == ["auto", "off", "fixed"] * 5
    for row in body["rows"]:
        assert row["name"] != "off" or (row["steps_on"], row["switches"]) == (0, 0)
        assert row["name"] != "fixed" or row["steps_off"] == 0


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


@pytest.mark.nightly
def test_a_soaked_server_loses_nothing_and_answers_as_stock(tmp_path):
    app, report = typer.Typer(), tmp_path / "report.json"
    app.command()(bench_soak)
    flags = ["--hours", 0.002, "--rate", 6, "--max-tokens", 40, "--epoch-s", 2, "--settle-s", 1]
    shares = ["--choices", 0.2, "--grammar", 0.2, "--leaving", 0.2, "--checked", 20]
    arguments = [*flags, *shares, "--dtype", "float32", "--out", report]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    body = json.loads(report.read_text())
    rows = {row["name"]: row for row in body["rows"]}
    assert result.exit_code == 0, result.output
    assert rows["requests answered"]["value"] > 10 and rows["requests left"]["value"] > 0
    assert rows["answers that are not stock's"]["identical"] and body["compared"]["tokens"] > 100
    assert rows["drafted"]["value"] > rows["accepted"]["value"] > 0
    assert rows["rewards matched"]["value"] > 0
    assert {"front end", "engine core"} <= set(body["samples"][0]["holdings"])
