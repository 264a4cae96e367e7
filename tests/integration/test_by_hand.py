"""Training by hand: what it keeps, resumes, refuses and says. Its trainer is the real one; rows are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("speculators")

from safetensors.torch import load_file

from tests.integration.test_trainer_process import send
from tests.unit.training.targets import HIDDEN, Prefilled, counting, make_target
from vllm_specrollout.cli.train_head import _check_learner, _tell
from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.server.by_hand import HandTraining
from vllm_specrollout.training.answers import KeptAnswer
from vllm_specrollout.training.heads import frequent_tokens, layers_of
from vllm_specrollout.training.parent import Duty, Said, TrainerProcess, numbers_in
from vllm_specrollout.training.process import make_head
from vllm_specrollout.training.rows import RowSink


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def write(path: Path, answers: list[KeptAnswer]) -> Path:
    with path.open("a") as file:
        for one in answers:
            ids = one.token_ids.tolist()
            file.write(json.dumps({"prompt_token_ids": ids[:3], "token_ids": ids[3:]}) + "\n")
    return path


class ByHand(HandTraining):
    """Without an engine: what it would compute is sent as it would be."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def _compute(self, trainer: TrainerProcess, answers: list[KeptAnswer]) -> None:
        self.asked.append(len(answers))
        sink, before = RowSink(trainer.duty.rows), trainer.hear().answers
        layers = layers_of(2) if self._duty.method == "eagle3" else ()
        for i, rows in enumerate(Prefilled()(Path(self._duty.target), layers, answers)):
            while not send(sink, rows, f"rows-{before + i}"):
                trainer.hear()
        while trainer.hear().answers < before + len(answers):
            pass
        sink.close()


def training(target: Path, file: Path, out: Path, *, start: Path | None = None, **given: Any) -> ByHand:
    method = given.get("method", "eagle3")
    if start is None and not (out / "0").exists():
        make_head(target, out / "0", method, 2)
    duty = Duty(**{
        "target": str(target), "dir": str(out), "head": str(start or out / "0"), "is_new": start is None,
        "num_levels": 2, "judge_rows": 2048, "learner": {"batch_rows": 128, "dtype": "float32", "rate": 5e-3}, **given,
    })  # fmt: skip
    return ByHand(duty, file, lambda text, is_prompt: [], SimpleNamespace(hidden_size=HIDDEN, vocab_size=24))


@pytest.mark.parametrize("method", ["eagle3", pytest.param("eagle", marks=pytest.mark.nightly)])
def test_a_head_is_made_and_trained_further_and_answers_that_come_meanwhile_count(target, tmp_path, method) -> None:
    file, added = write(tmp_path / "answers.jsonl", counting(40, 26)), list[Path]()

    def rollout(said: Said) -> None:
        if said.steps and not added:
            added.append(write(file, counting(20, 26, first=40)))

    first = training(target, file, tmp_path / "first", method=method)
    said = first.train(1, rollout)
    assert said.own > said.serving and said.judged > 0 and len(first.done) == 60
    # started again, it goes on with what is there by then, and what it has done with teaches nothing more
    write(file, counting(20, 26, first=60))
    again = training(target, file, tmp_path / "first", method=method).train(2)
    assert said.rows < again.rows < said.rows * 80 / 60 * 1.2
    assert numbers_in(tmp_path / "first") == [0, 1, 2]
    about = json.loads((tmp_path / "first" / "1" / "config.json").read_text())
    names = set(load_file(tmp_path / "first" / "1" / "model.safetensors"))
    if method == "eagle3":
        assert about["speculators_model_type"] == "eagle3" and about["eagle_aux_hidden_state_layer_ids"] == [1]
    else:
        assert about["num_hidden_layers"] == 1 and about["architectures"] == ["LlamaForCausalLM"]
        assert "fc.weight" in names and not any("embed" in name or "lm_head" in name for name in names)
    further = training(target, file, tmp_path / "second", method=method, start=tmp_path / "first" / "1").train(1)
    assert further.serving == pytest.approx(said.own, abs=0.25), "what was kept is what was judged, but for its dtype"


def test_with_little_memory_answers_are_computed_in_turns_and_each_is_used(target, tmp_path) -> None:
    file = write(tmp_path / "answers.jsonl", counting(84, 26))
    run = training(target, file, tmp_path / "head", memory_gib=0.0003)
    run.train(1)
    rows = int(0.0003 * (1 << 30) / (4 * 4 * HIDDEN))
    assert sum(run.asked) == len(run.done) == 84 and len(run.asked) > 1
    assert max(run.asked) <= -(-rows // 26)


def test_nothing_to_judge_by_and_no_answer_are_refused(target, tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="the file holds no answer"):
        training(target, write(tmp_path / "none.jsonl", []), tmp_path / "head")
    with pytest.raises(UnsupportedError, match="none of 1 answers is held out to judge by"):
        training(target, write(tmp_path / "one.jsonl", counting(1, 26)), tmp_path / "head").train(1)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (("eagle", 2, 100, 1024, {}), "an `eagle` head has its target's output head"),
        (("medusa", 2, 0, 1024, {}), "`method` names 'medusa'"),
        (("eagle3", 1, 0, 1024, {}), "`num_levels` is 1"),
        (("eagle3", 2, 0, 511, {}), "`judge_rows` is 511"),
        (("eagle3", 2, 0, 1024, {"loss": "mse"}), "`loss` names 'mse'"),
    ],
)
def test_what_a_trainer_cannot_have_is_refused_before_anything_begins(given: Any, cause: str) -> None:
    *checked, learner = given
    with pytest.raises(ConfigError, match=cause):
        _check_learner(*checked, {"batch_rows": 512} | learner)


def test_a_small_vocabulary_has_the_tokens_that_were_sampled_most_often() -> None:
    answers = counting(40, 26)
    sampled = [token for one in answers for token in one.token_ids[3:].tolist()]
    found = frequent_tokens(answers, 24, 5)
    assert found == sorted(found) and min(map(sampled.count, found)) >= sorted(map(sampled.count, range(24)))[-5]


def told(capsys: Any, **said: Any) -> Callable[..., str]:
    def tell(start: Path | None = None, *, is_json: bool = False) -> str:
        _tell(Path("HEAD"), start, Said(**said), 384, 6, is_json=is_json)
        return capsys.readouterr().out

    return tell


def test_a_head_that_is_not_worth_having_is_said_to_be_none_with_what_would_help(capsys: Any) -> None:
    for own, is_useful in ((0.5, False), (2.4, True)):
        tell = told(capsys, own=own, serving=0.01, judged=900, rows=110_000, steps=430)
        assert f"900 rows held out: {own:.2f} of 6 drafts accepted, before 0.01" in (text := tell())
        assert ("this head is not worth having" in text and "hint: it needs more answers" in text) is not is_useful
        assert json.loads(tell(is_json=True))["is_useful"] is is_useful


def test_answers_that_teach_a_head_nothing_leave_it_as_it_was_and_that_is_said(capsys: Any) -> None:
    text = told(capsys, own=0.0, serving=2.0, judged=900)(Path("first"))
    assert "2.00 of 6" in text and "taught `first` nothing" in text
