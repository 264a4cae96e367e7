"""The RL loop end to end, tiny: new weights reach every engine, ours answers as stock, everything is written."""

import json

import pytest
import typer
from typer.testing import CliRunner
from vllm_specrollout.bench.policy.grpo import AnswerGroup, GrpoConfig, GrpoTrainer

from bench.grpo.fleet import Roller
from bench.grpo.trace import read_rollouts
from bench.runner.engines import sampling
from bench.scenarios.grpo import Grpo, bench_grpo
from tests import warm
from vllm_specrollout.config import DRAFTERS

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
OURS = {"drafters": ["history" if "history" in DRAFTERS else "ngram"]}
PROMPTS = [[3, 87, 261, 308, 18, 4], [3, 90, 120, 7, 4]]
GROUP = AnswerGroup(prompt_ids=tuple(PROMPTS[0]), answers=((5, 6, 7), (8, 9, 4)), rewards=(1.0, 0.0))


@pytest.fixture(scope="module", autouse=True)
def _warm():
    with warm.engine_processes():
        yield


@pytest.fixture(scope="module")
def updated(model, tmp_path_factory):
    """The tiny policy after a few large updates."""
    trainer = GrpoTrainer(model, GrpoConfig(learning_rate=1e-2))
    for _ in range(3):
        trainer.update([GROUP])
    return trainer.save(tmp_path_factory.mktemp("updated") / "policy", "float32")


def invoke(*arguments):
    app = typer.Typer()
    app.command()(bench_grpo)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def answers(engine, arm):
    # vLLM's own speculation does not sample the same tokens in two runs, whatever the seeds
    greedy = {} if arm.speculative_config is None else {"temperature": 0.0}
    params = [{**sampling(i, 24, is_to_the_end=True), **greedy} for i in range(len(PROMPTS))]
    return engine.ask("generate", prompts=PROMPTS, params=params)["token_ids"]


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(Roller(name="stock"), id="stock", marks=pytest.mark.nightly),
        pytest.param(Roller(name="ngram", speculative_config=NGRAM), id="ngram", marks=pytest.mark.nightly),
        pytest.param(Roller(name="ours", spec_rollout=OURS), id="ours"),
    ],
)
def test_after_a_push_an_engine_answers_as_one_started_with_those_weights(arm, model, updated):
    plan = Grpo(dtype="float32", batch=4, max_tokens=32)
    answered = {}
    for name, folder in (("old", model), ("new", updated)):
        with plan.make_engines(folder, lambda *_: None, seqs=4, length=288, width=512) as engines:
            arm.start(engines)
            engine = engines[arm.name]
            answered[name] = answers(engine, arm)
            if name == "old":
                engine.ask("reload", folder=str(updated))
                answered["pushed"] = answers(engine, arm)
                engine.ask("reload", folder=str(model))
                answered["back"] = answers(engine, arm)
    assert answered["pushed"] == answered["new"]
    assert answered["new"] != answered["old"]
    assert answered["back"] == answered["old"]


@pytest.mark.nightly
def test_a_loop_of_all_engines_is_identical_where_promised_and_is_written_down(tmp_path):
    report, trace, save = (tmp_path / name for name in ("report.json", "trace", "saved"))
    flags = ["--quick", "--size", "30M", "--engines", "stock,ngram,ours", "--spec-rollout", json.dumps(OURS)]
    flags += ["--learning-rate", "1e-3", "--cache", tmp_path / "cache"]
    result = invoke(*flags, "--out", report, "--trace", trace, "--save", save)
    assert result.exit_code == 0, result.output
    assert (save / "model.safetensors").is_file()
    body = json.loads(report.read_text())
    assert [(row["step"], row["epoch"], row["weights_version"]) for row in body["rows"]] == [(0, 0, 0), (1, 1, 1)]
    for row in body["rows"]:
        runs = {run["engine"]: run for run in row["runs"]}
        assert list(runs) == ["stock", "ngram", "ours"]
        assert (runs["stock"]["identical"], runs["ngram"]["identical"], runs["ours"]["identical"]) == (None, None, True)
        assert runs["ours"]["num_tokens"] == runs["stock"]["num_tokens"]
        assert runs["ours"]["reward"] == runs["stock"]["reward"] == row["reward"]
    assert [epoch["epoch"] for epoch in body["epochs"]] == ["1", "2", "all", "2 on"]
    lines = list(read_rollouts(trace))
    assert len(lines) == 2 * 2 * 2
    assert len({line["request_id"] for line in lines}) == len({line["seed"] for line in lines}) == len(lines)
    assert {line["problem_id"] for line in lines if line["epoch"] == 0} == {
        line["problem_id"] for line in lines if line["epoch"] == 1
    }
    for line in lines:
        assert line["num_tokens"] == len(line["token_ids"]) <= 24
        assert line["weights_version"] == line["step"]
