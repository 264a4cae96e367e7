"""What `bench decoupled` shows of what it found."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from vllm_specrollout.bench.runner.fields import Row
from vllm_specrollout.bench.runner.report import Found
from vllm_specrollout.bench.runner.scenario import run
from vllm_specrollout.bench.scenarios.decoupled import COUPLED, DECOUPLED, Decoupled


def row(is_told: bool) -> Row:
    """A setting; without figures where an output was not stock's."""
    speedup, quartiles = (1.25, (1.0, 1.5)) if is_told else (None, None)
    way = dict(speedup=speedup, quartiles=quartiles, estimated=1.0, tokens_per_step=2.0)
    return Row(
        drafter="small",
        batch=2,
        window=4,
        identical=is_told,
        difference=None if is_told else "request 0 differs at token 7",
        stock_tokens_per_s=20.0 if is_told else None,
        stock_quartiles=(0.875, 1.125) if is_told else None,
        ways={COUPLED: way, DECOUPLED: way},
        planned=COUPLED,
        fastest=COUPLED if is_told else None,
        lost=0.0 if is_told else None,
    )


FOUND = Found(model="a model", rows=[row(True), row(False)])


def test_every_setting_is_a_line_and_no_speed_is_shown_where_an_output_differs() -> None:
    out = Console(file=io.StringIO(), width=200)
    Decoupled().show(FOUND, out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    told, untold = (line for line in text.splitlines() if line.lstrip(" │").startswith("small "))
    assert told.count("1.25x (1.00 to 1.50); 1.00x, -20%") == 2
    assert "0.88 to 1.12" in told
    assert "x" not in untold and " to " not in untold and untold.count("outputs differ") == 2
    assert "small, batch 2, window 4: request 0 differs at token 7" in text


def test_what_was_measured_is_written_even_where_it_cannot_be_shown(
    tmp_path: Path,
) -> None:
    class Mute(Decoupled):
        def check(self) -> None:
            pass

        def measure(self, session: object) -> Found:
            return FOUND

        def show(self, found: Found, out: Console) -> None:
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        run(Mute(out=tmp_path / "report.json"))
    assert len(json.loads((tmp_path / "report.json").read_text())["rows"]) == 2
