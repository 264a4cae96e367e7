"""What `bench decoupled` shows of what it found."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bench.runner.report import Found
from bench.runner.rows import Pair, Run
from bench.runner.scenario import run
from bench.scenarios.decoupled import COUPLED, DECOUPLED, Decoupled


@pytest.fixture
def found(make_run: Callable[..., Run]) -> Found:
    """A setting, and one without figures, as an output was not stock's."""

    def paired(token: int, seconds: float) -> list[Pair]:
        totals = {"steps": 4, "request_steps": 1, "drafted": 4}
        return [Pair(stock=make_run([[7, 8]], [10.0]), ours=make_run([[7, token]], [seconds], **totals))] * 2

    told = {COUPLED: paired(8, 8.0), DECOUPLED: paired(8, 20.0)}
    scenario = Decoupled()
    rows = [scenario._row("small", 2, 4, told), scenario._row("small", 2, 4, {**told, DECOUPLED: paired(9, 5.0)})]
    return Found(model="a model", rows=rows)


def test_the_fastest_is_named_plain_decoding_among_them(found: Found) -> None:
    right, wrong = found.rows
    assert (right.fastest, right.ways[COUPLED]["speedup"], right.ways[DECOUPLED]["speedup"]) == (COUPLED, 1.25, 0.5)
    assert right.ways[COUPLED]["tokens_per_step"] == 2.0 and right.stock_tokens_per_s == 0.2
    assert wrong.fastest is None and wrong.ways[COUPLED]["speedup"] is None


def test_every_setting_is_a_line_and_no_speed_is_shown_where_an_output_differs(found: Found) -> None:
    out = Console(file=io.StringIO(), width=200)
    Decoupled().show(found, out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    told, untold = (line for line in text.splitlines() if line.lstrip(" │").startswith("small "))
    assert "1.25x (1.25 to 1.25)" in told and "0.50x (0.50 to 0.50)" in told and "1.00 to 1.00" in told
    assert "x" not in untold and " to " not in untold and untold.count("outputs differ") == 2
    assert "small, batch 2, window 4: request 0, token 1: stock 8, ours 9" in text


def test_what_was_measured_is_written_even_where_it_cannot_be_shown(found: Found, tmp_path: Path) -> None:
    class Mute(Decoupled):
        def check(self) -> None:
            pass

        def measure(self, session: object) -> Found:
            return found

        def show(self, shown: Found, out: Console) -> None:
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        run(Mute(out=tmp_path / "report.json"))
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == 2
