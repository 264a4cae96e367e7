"""What prompts a file may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_specrollout.cli.prompts import read_prompts
from vllm_specrollout.errors import ConfigError


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
