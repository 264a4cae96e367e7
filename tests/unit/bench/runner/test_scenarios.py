"""Every scenario through the runner, with engines that answer at once: what is run, reported, and refused a speed."""

import json

import pytest

from bench.runner import ties
from bench.scenarios.decode import bench_engine
from bench.scenarios.load import bench_ramp
from bench.scenarios.rollout import bench_rollout
from bench.scenarios.sweep import bench_sweep
from tests.unit.bench.runner.fake_engines import invoke
from vllm_specrollout.errors import ConfigError

SCENARIOS = {
    "engine": (bench_engine, ["--batch", "1,3", "--draft", "2,6", "--tokens", 24]),
    "off path": (bench_engine, ["--batch", "2", "--tokens", 24, "--off-path"]),
    "rollout": (bench_rollout, ["--prompts", 3, "--samples", 2, "--batch", 4, "--max-tokens", 40]),
    "sweep": (bench_sweep, ["--batch", "1,3", "--accuracy", "0.9", "--draft", "1,3", "--tokens", 12]),
    "ramp": (bench_ramp, ["--budget", "off,fixed", "--requests", 9, "--tokens", 12]),
}
ROWS = {"engine": 4, "off path": 3, "rollout": 1, "sweep": 6, "ramp": 15}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder


@pytest.fixture
def ran(measured, model):
    def run(name, *flags, **behaviour):
        function, arguments = SCENARIOS[name]
        return measured(function, "--model", model, "--rounds", 2, *arguments, *flags, **behaviour)

    return run


@pytest.mark.parametrize("name", SCENARIOS)
def test_identical_outputs_are_told_with_their_speed(ran, name):
    status, report, printed = ran(name)
    assert (status, len(report["rows"])) == (0, ROWS[name])
    for row in report["rows"]:
        assert row["identical"] and len(row["rounds_s"]) == 2
        assert row["speedup"] == pytest.approx(1.0 if row["name"] == "installed, off" else 2.0)
    assert "2.00x" in printed


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_wrong_token_costs_every_speed_and_the_exit_status(ran, name):
    status, report, printed = ran(name, is_ours_wrong=True)
    wrong = [row for row in report["rows"] if row["name"] != "installed, off"]
    assert status == 1 and wrong
    for row in wrong:
        assert not row["identical"] and "ours" in row["difference"] and row["difference"] in printed
        assert row["speedup"] is row["makespan_s"] is row["rounds_s"] is row["tokens_per_s"] is None
    assert "2.00x" not in printed


@pytest.mark.parametrize("name", SCENARIOS)
def test_nobody_is_compared_with_stock_that_does_not_repeat_itself(ran, name):
    status, report, printed = ran(name, is_stock_unsteady=True)
    assert status == 1
    assert all(row["speedup"] is None for row in report["rows"])
    assert "2.00x" not in printed


@pytest.mark.parametrize("name", ["sweep", "ramp"])
def test_where_tokens_differ_no_other_seed_is_drawn(ran, name):
    _, report, _ = ran(name, is_ours_wrong=True)
    assert {row["seed"] for row in report["rows"]} == {0}
    assert all(row["ties"] == [] and "apart" in row["difference"] for row in report["rows"])


@pytest.mark.parametrize("name", ["sweep", "ramp"])
def test_proven_ties_are_listed_and_pass_without_a_speed(ran, monkeypatch, name):
    asked = []

    def proves(stock, prompt, params, answer, parting, dtype, *, is_given):
        asked.append((tuple(prompt), parting, tuple(answer[: parting.position])))
        assert (stock.spec.name, params["seed"], dtype) == ("judge", parting.request, "bfloat16")
        assert stock.spec.arguments["logprobs_mode"] == "processed_logits" and "extra_args" not in params
        return True, "level"

    monkeypatch.setattr(ties, "asked", proves)
    status, report, printed = ran(name, is_ours_wrong=True)
    assert status == 0 and "2.00x" not in printed and "a proven tie: request" in printed
    assert len(asked) == len(set(asked))
    for row in report["rows"]:
        assert not row["identical"] and row["is_proven"] and not row["is_comparable"] and row["speedup"] is None
        assert row["ties"][0].endswith(", level")


def test_a_sweep_names_the_best_fixed_length_and_a_ramp_the_best_budget(ran):
    _, sweep, _ = ran("sweep")
    assert sweep["rows"][0]["auto_to_best"] == pytest.approx(1.0) and sweep["rows"][0]["best_draft"] == 1
    assert sweep["settings"]["tokens"] == {"1": 12, "3": 12}
    _, ramp, printed = ran("ramp")
    assert (ramp["rows"][0]["pattern"], ramp["rows"][0]["best"]) == ("drain", "off") and "1.00 (off)" in printed
    assert ramp["settings"]["patterns"][0] == "drain"


def test_settings_name_the_model_and_no_place_of_it(ran, tmp_path):
    _, report, _ = ran("engine")
    assert report["settings"]["model"] == "model"
    assert str(tmp_path) not in json.dumps({**report, "command": ""})


@pytest.mark.parametrize(
    ("function", "arguments", "cause"),
    [
        (bench_engine, ["--size", "3M", "--model", "x"], "`--size` and `--model` are both given"),
        (bench_engine, ["--model", "x"], "`--model` is `x`, which holds no config.json"),
        (bench_engine, ["--out", "no/where.json"], "`--out` is `no/where.json`, whose folder does not exist"),
        (bench_rollout, ["--model", "x"], "`--model` is `x`, which holds no config.json"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(function, arguments, cause):
    assert invoke(function, *arguments).exception.cause == cause


def test_an_answer_too_long_for_the_model_is_refused(model):
    with pytest.raises(ConfigError, match="prompts and answers take up to 4864 tokens, and the model at most 4096"):
        raise invoke(bench_engine, "--model", model, "--tokens", 4096).exception


def test_a_rollout_tells_rewards_and_samples(ran):
    _, report, printed = ran("rollout", "--show-samples", 2)
    assert len(report["samples"]) == 2 and "mean reward" in printed
    assert 0.0 <= report["mean_reward"] <= 1.0
