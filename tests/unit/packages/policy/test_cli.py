"""The command line shows one clear error and the way out, and never a traceback, for bad input."""

import sys

import pytest
from vllm_specrollout.bench.policy.__main__ import app

from bench.runner.display import main


def test_bad_input_is_one_error_with_a_hint_and_exit_code_two(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy", "train", "--steps", "0", "--out", "x"])
    with pytest.raises(SystemExit) as ended:
        main(app)
    error = "error: `steps` is 0, outside 1 to 1073741824\n\nhint: choose a value from 1 to 1073741824\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, error)
