"""What `specrollout train-head` refuses before it trains, and that its help says how a head is made."""

import pytest
from typer.testing import CliRunner

from vllm_specrollout.cli import train_head as command
from vllm_specrollout.cli.commands import app
from vllm_specrollout.cli.train_head import train_head
from vllm_specrollout.errors import ConfigError, UnsupportedError


def test_the_help_leads_a_newcomer_from_answers_to_drafts():
    text = CliRunner().invoke(app, ["train-head", "--help"], terminal_width=200).output
    for part in (
        '{"prompt_token_ids": [...], "token_ids": [...]}',
        "train-head --target TARGET --answers ANSWERS.jsonl --out HEAD",
        '"num_speculative_tokens": 10',
    ):
        assert part in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "eagle2"}, "`method` names 'eagle2', which does not exist\n\nhint: did you mean `eagle`?"),
        ({"method": "eagle", "draft_vocab": 9}, "an `eagle` head has its target's output head"),
        ({"judge_rows": 1}, "`judge_rows` is 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, given, told):
    pytest.importorskip("speculators")
    with pytest.raises(ConfigError) as caught:
        train_head(target=tmp_path, answers=tmp_path / "answers", out=tmp_path / "out", **given)
    assert told in str(caught.value)


def test_a_library_that_is_missing_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"needs `torch`.*\n\nhint: run `pip install \"vllm-specrollout\[train\]"
    ):
        train_head(target=tmp_path, answers=tmp_path / "answers", out=tmp_path / "out")
