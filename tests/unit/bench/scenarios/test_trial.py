"""`specrollout try`: what prompts a file may hold, and what the first line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.runner.rows import Judged, Pair, proven_row
from bench.scenarios.trial import Trial, read_prompts, verdict
from vllm_specrollout.errors import ConfigError


@pytest.fixture
def pair(make_run):
    """Stock takes eight seconds, ours four."""
    ours = make_run([[1, 2, 4]], [1.0, 4.0], steps=2, request_steps=2, drafted=2, accepted=1)
    return Pair(stock=make_run([[1, 2, 3]], [1.0, 8.0]), ours=ours)


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("What is 1 + 1?\n\nAnd  2?\n", encoding="utf-8")
    assert read_prompts(path) == ["What is 1 + 1?", "And  2?"]


def test_json_lines_hold_texts_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": 2}\n{"prompt": [{"role": "user", "content": "b"}]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a", [{"role": "user", "content": "b"}]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", "\n \n", "holds no prompt"),
        ("bad.jsonl", '{"prompt": "a"}\n{"question": "b"}\n', "line 2 of"),
        ("bad.jsonl", "plain text\n", "line 1 of"),
    ],
)
def test_what_holds_no_prompts_is_one_clear_error(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as error:
        read_prompts(path)
    assert error.value.hint


def test_a_model_and_a_file_have_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        Trial().check()
    with pytest.raises(ConfigError, match="`--prompts` names no file"):
        Trial(model="any").check()
    with pytest.raises(ConfigError, match="drafter"):
        Trial(model="any", prompts=tmp_path / "any", spec_rollout={"drafter": ["ngram"]}).check()


def test_no_speed_is_told_of_other_tokens(pair: Pair) -> None:
    row = proven_row("epoch 1", 1, 0, [pair], Judged(differences=["request 0, token 2"]))
    assert row.speedup is None and row.identical is False and not row.is_proven
    assert verdict([row], "").startswith("NOT the tokens of stock vLLM")
    assert "does not repeat itself" in verdict([row], "request 0, token 2")


def test_behind_proven_ties_a_speed_is_told_and_so_are_they(pair: Pair) -> None:
    row = proven_row("epoch 1", 1, 0, [pair], Judged(ties=["request 0, token 2"]))
    assert row.speedup == 2.0 and row.identical is False and row.is_proven
    assert verdict([row], "") == "stock vLLM's tokens, but for 1 proven ties: 2.00x as fast in epoch 1"


def test_equal_tokens_are_told_with_their_speed(pair: Pair, make_run) -> None:
    same = Pair(stock=pair.ours, ours=make_run([[1, 2, 4]], [1.0, 2.0], steps=2, request_steps=2))
    row = proven_row("epoch 2", 1, 0, [same], Judged())
    assert row.identical
    assert verdict([row], "") == "the very tokens of stock vLLM: 2.00x as fast in epoch 2"
