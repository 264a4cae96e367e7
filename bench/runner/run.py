"""Runs a scenario: checks, measures, prints, draws, writes; ends with status 1 if one output was not stock's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console

from . import scenario as scenario_module
from .display import Display
from .report import Found, as_json
from .scenario import Scenario, Session


def run(scenario: Scenario) -> None:
    """
    Raises:
        SpecRolloutError: a flag that makes no sense, or an engine that failed.
        typer.Exit: outputs differ.
    """
    scenario = scenario.resolved()
    scenario.check()
    with Display() as display, tempfile.TemporaryDirectory(prefix="specrollout-") as scratch:
        found = scenario.measure(Session(display, Path(scratch)))
    scenario.show(found, display.out)
    picture: Path | None = getattr(scenario, "plot", None)
    if picture is not None and (found.is_identical or scenario.draws_what_is_left):
        scenario.draw(found, picture)  # type: ignore[attr-defined]
        _say(display.out, picture)
    if scenario.json is not None:
        scenario.json.write_text(as_json(scenario.bench, scenario.settings(), found), encoding="utf-8")
        _say(display.out, scenario.json)
    if not found.is_identical:
        raise typer.Exit(1)


def command(scenario: type[Scenario]) -> Callable[..., None]:
    """The scenario's command, for typer."""
    return scenario_module.command(scenario, run)


def _say(out: Console, path: Path) -> None:
    out.print(f"wrote {path}", markup=False)


__all__ = ["Found", "Session", "command", "run"]
