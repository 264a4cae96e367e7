"""What a reader sees of work that takes minutes, where no bar can be drawn."""

from __future__ import annotations

import pytest

from bench.runner.display import Display


def test_through_a_pipe_each_step_is_a_line_of_stderr_as_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        report = display.steps(2)
        report("starting vLLM", 0)
        assert capsys.readouterr().err == "starting vLLM ...\n"
        report("", 1)
        report("epoch 1 of 2", 0)
    told = capsys.readouterr()
    assert told.err == "epoch 1 of 2 ...\n" and told.out == ""
