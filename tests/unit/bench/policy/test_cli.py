"""The command line shows one clear error and the way out, and never a traceback, for bad input."""

import sys

import pytest
from typer.testing import CliRunner

from bench.policy.__main__ import app
from bench.runner.display import main


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["train", "--steps", "0", "--out", "x"],
            "error: steps is 0, the least is 1\n\nhint: give a larger steps\n",
        ),
        (
            ["stats", "--problems", "1"],
            "error: 1 problems x 4 samples are too few, the least is 2 x 2\n\n"
            "hint: give larger --problems and --samples\n",
        ),
        (
            ["reward-demo", "--count", "-1"],
            "error: count is -1, the least is 0\n\nhint: ask for a positive number of problems\n",
        ),
    ],
)
def test_bad_input_is_one_error_with_a_hint_and_exit_code_two(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(app)
    assert ended.value.code == 2
    assert capsys.readouterr().err == error


def test_the_reward_demo_shows_right_answers_and_their_rewards():
    result = CliRunner().invoke(app, ["reward-demo", "--count", "3"])
    assert result.exit_code == 0
    assert result.stdout.count("reward 1.0, cut in half 0.0") == 3
