"""The command line shows one clear error and the way out, and never a traceback, for bad input."""

import sys

import pytest
from vllm_specrollout.bench.policy.__main__ import app

from bench.runner.display import main


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["train", "--steps", "0", "--out", "x"],
            "error: `steps` is 0, outside 1 to 1073741824\n\nhint: choose a value from 1 to 1073741824\n",
        ),
    ],
)
def test_bad_input_is_one_error_with_a_hint_and_exit_code_two(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(app)
    assert ended.value.code == 2
    assert capsys.readouterr().err == error
