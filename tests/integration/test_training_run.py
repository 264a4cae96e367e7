"""A run by hand: what it keeps, resumes, refuses and reports. Needs the `speculators` library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

from safetensors.torch import load_file

from tests.unit.training.targets import HIDDEN, LAYERS, Prefilled, counting, make_target
from vllm_specrollout.cli.train_head import _tell
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.training.answer_file import AnswerFile
from vllm_specrollout.training.answers import KeptAnswer
from vllm_specrollout.training.learner import HeadJudgement
from vllm_specrollout.training.run import METRICS, STATE, HeadRun, TrainConfig, Trained

LEARNER = {"num_levels": 2, "batch_rows": 128, "dtype": "float32"}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def write(path: Path, answers: list[KeptAnswer]) -> Path:
    with path.open("a") as file:
        for one in answers:
            ids = one.token_ids.tolist()
            file.write(json.dumps({"prompt_token_ids": ids[:3], "token_ids": ids[3:]}) + "\n")
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "answers.jsonl", counting(24, 26))


def run_of(target: Path, file: Path, out: Path, *, start: Path | None = None, **given: Any) -> HeadRun:
    learner = {name: given.pop(name) for name in ("num_levels", "seed") if name in given}
    config = TrainConfig(**{"rate": 5e-3, "judge_rows": 1 << 20, **given})
    answers = AnswerFile(file, lambda text, begins: [], 24)
    return HeadRun(target, answers, out, config, {**LEARNER, **learner}, Prefilled(), start=start)


class Killed(Exception):
    pass


def killed_after(steps: int):
    def on_step(learner: Any, loss: float) -> None:
        if learner.steps == steps:
            raise Killed

    return on_step


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_head_is_made_kept_and_trained_further(target, file, tmp_path, method):
    trained = run_of(target, file, tmp_path / "first", method=method).train()
    assert trained.kept.accepted > trained.first.accepted and trained.answers == 24
    further = run_of(target, file, tmp_path / "second", method=method, start=tmp_path / "first", rate=0.0)
    assert further.learner.config.rate == 3e-4, "a head that was trained"
    # what was kept is what was judged, but for its dtype
    assert further.train().first.accepted == pytest.approx(trained.kept.accepted, abs=0.02)
    about = json.loads((tmp_path / "first" / "config.json").read_text())
    names = set(load_file(tmp_path / "first" / "model.safetensors"))
    if method == "eagle3":
        assert about["speculators_model_type"] == "eagle3" and about["eagle_aux_hidden_state_layer_ids"] == [1]
    else:
        assert about["num_hidden_layers"] == 1 and about["architectures"] == ["LlamaForCausalLM"]
        assert "fc.weight" in names and not any("embed" in name or "lm_head" in name for name in names)


def test_a_run_that_was_killed_goes_on_with_the_answers_that_are_there_by_then(target, file, tmp_path):
    with pytest.raises(Killed):
        run_of(target, file, tmp_path / "head", judge_rows=400).train(killed_after(12))
    write(file, counting(20, 26, first=24))
    again = run_of(target, file, tmp_path / "head", judge_rows=400)
    began_at = again.learner.steps
    assert 0 < began_at <= 12
    trained = again.train()
    unkilled = run_of(target, file, tmp_path / "whole").train()
    assert trained.rows == pytest.approx(unkilled.rows, rel=0.15), "each answer three times, and no more"
    assert trained.kept.accepted > trained.first.accepted
    lines = [json.loads(line) for line in (tmp_path / "head" / METRICS).read_text().splitlines()]
    assert lines[-1]["rows"] == trained.rows and lines[-1]["seconds"] >= lines[0]["seconds"]
    # nothing is left: a third start learns nothing more
    assert run_of(target, file, tmp_path / "head", judge_rows=400).train().rows == trained.rows


def test_what_a_rollout_adds_while_the_head_is_trained_is_learned_from(target, file, tmp_path):
    run = run_of(target, file, tmp_path / "head")
    added = []

    def rollout(learner: Any, loss: float) -> None:
        if learner.steps == 3:
            added.append(write(file, counting(20, 26, first=24)))

    assert run.train(rollout).answers == 44 and len(added) == 1


def test_with_little_memory_answers_are_computed_in_turns_and_each_is_used(target, file, tmp_path):
    run = run_of(target, file, tmp_path / "head", memory_gib=0.0001)
    rows = int(0.0001 * (1 << 30) / (4 * 2 * HIDDEN))
    write(file, counting(60, 26, first=24))
    trained = run.train()
    assert trained.answers == 84 and len(run._prefill.asked) > 1
    assert max(run._prefill.asked) <= -(-rows // 26)


def test_the_head_that_is_kept_is_the_best_one_and_not_the_last(target, file, tmp_path, monkeypatch):
    run = run_of(target, file, tmp_path / "head", judge_rows=400)
    judged = iter([0.2, 0.9, 0.5, 0.4, *[0.3] * 50])
    monkeypatch.setattr(run.learner, "judge", lambda: HeadJudgement((next(judged), 0.0), 1.0, 100))
    trained = run.train()
    assert trained.kept.accepted == 0.9 and trained.first.accepted == 0.2


def test_a_head_that_is_not_worth_having_is_said_to_be_none_with_what_would_help(tmp_path, capsys):
    for met, is_useful in (((0.4, 0.1, 0.0, 0.0, 0.0, 0.0), False), ((0.8, 0.6, 0.4, 0.3, 0.2, 0.1), True)):
        found = Trained(HeadJudgement(met, 2.0, 900), HeadJudgement((0.0,) * 6, 1.0, 900), 384, 110_000, 430)
        _tell(tmp_path, None, found, is_json=False)
        told = capsys.readouterr().out
        assert f"all met: {met[0]:.2f}, {met[1]:.2f}" in told
        assert ("this head is not worth having" in told and "hint: it needs more answers" in told) is not is_useful
        _tell(tmp_path, None, found, is_json=True)
        assert json.loads(capsys.readouterr().out)["is_useful"] is is_useful


def test_answers_that_teach_a_head_nothing_leave_it_as_it_was_and_that_is_said(tmp_path, capsys):
    same = HeadJudgement((0.8, 0.6), 2.0, 900)
    _tell(tmp_path, tmp_path / "first", Trained(same, same, 40, 1000, 4), is_json=False)
    assert "taught" in capsys.readouterr().out


def test_a_head_may_draft_the_most_frequent_tokens_alone(target, file, tmp_path):
    run = run_of(target, file, tmp_path / "head", draft_vocab=10)
    run.train()
    assert run.learner.head.lm_head.weight.shape == (10, HIDDEN) and int(run.learner.head.t2d.sum()) == 10


def test_what_cannot_go_on_is_refused_with_the_way_out(target, file, tmp_path):
    run_of(target, file, tmp_path / "head").train(lambda learner, loss: None)
    with pytest.raises(ConfigError, match=rf"{STATE}` is of another run: seed differ\n\nhint: choose another --out"):
        run_of(target, file, tmp_path / "head", seed=1)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(UnsupportedError, match="the file holds no answer"):
        run_of(target, empty, tmp_path / "other")
    few = write(tmp_path / "few.jsonl", counting(1, 26))
    with pytest.raises(UnsupportedError, match="none of 1 answers is held out to judge by"):
        run_of(target, few, tmp_path / "other").train()
    with pytest.raises(ConfigError, match="is no model"):
        run_of(target, file, tmp_path / "other", start=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="an `eagle` head has its target's output head"):
        TrainConfig(method="eagle", draft_vocab=9)


def test_layers_are_those_of_the_head_that_is_trained_further(target, file, tmp_path, monkeypatch):
    with monkeypatch.context() as another:
        another.setattr("vllm_specrollout.training.run.layers_of", lambda depth: LAYERS)
        run_of(target, file, tmp_path / "first").train()
    assert run_of(target, file, tmp_path / "new").source.layers == (1,)
    assert run_of(target, file, tmp_path / "second", start=tmp_path / "first").source.layers == LAYERS
