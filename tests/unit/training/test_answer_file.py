"""A file of answers that grows while it is read, and what is wrong with a line of it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from vllm_specrollout.errors import ConfigError, UnsupportedError
from vllm_specrollout.training.answer_file import AnswerFile

VOCAB = 300


def file_of(path: Path) -> AnswerFile:
    return AnswerFile(path, lambda text, begins: [1] * begins + list(text.encode()), VOCAB)


def line(first: int, **more: object) -> str:
    return json.dumps({"prompt_token_ids": [first, 2], "token_ids": [3, 4, 5], **more}) + "\n"


def test_token_ids_are_taken_as_they_are_and_texts_are_encoded(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(line(7, version=3) + "\n" + json.dumps({"prompt": "ab", "answer": "c"}))
    ids, text = file_of(path).unread()
    assert (ids.token_ids.tolist(), ids.prompt_tokens, ids.version) == ([7, 2, 3, 4, 5], 2, 3)
    assert (text.token_ids.tolist(), text.prompt_tokens, text.version) == ([1, 97, 98, 99], 3, 0)


def test_what_a_rollout_adds_comes_next_time_and_a_half_written_line_when_it_is_whole(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(line(7))
    file = file_of(path)
    assert [one.token_ids[0] for one in file.unread()] == [7]
    with path.open("a") as rollout:
        rollout.write(line(8) + line(9)[:10])
        rollout.flush()
        assert [one.token_ids[0] for one in file.unread()] == [8]
        rollout.write(line(9)[10:])
        rollout.flush()
        assert [one.token_ids[0] for one in file.unread()] == [9]
        assert file.unread() == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "line 2 of .* is no JSON"),
        ('{"prompt": "a"}', "line 2 of .* has no prompt and answer"),
        ('{"prompt_token_ids": [1], "token_ids": [300]}', r"has a `token_ids` that is none for 300 tokens: \[300\]"),
        ('{"prompt_token_ids": "a", "token_ids": [1]}', "has a `prompt_token_ids` that is none"),
        ('{"prompt": "a", "answer": "b", "version": "x"}', "has `version` 'x', which is no integer"),
    ],
)
def test_a_line_that_is_no_answer_is_named_with_the_form_that_is_wanted(tmp_path, given, told):
    path = tmp_path / "answers.jsonl"
    path.write_text(line(1) + given + "\n")
    with pytest.raises(ConfigError, match=told) as caught:
        file_of(path).unread()
    assert '{"prompt_token_ids": [...], "token_ids": [...]}' in caught.value.hint


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="is no file"):
        file_of(tmp_path / "none.jsonl")
