"""`specrollout bench study`: a study's inputs in; our figures beside the paper's out. Without engine and torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from vllm_specrollout.bench.studies import fastgrpo, rhymerl, specactor, tlt, what_if
from vllm_specrollout.bench.studies.report import Inputs, ResultTable, StudyReport

from vllm_specrollout.cli import flags
from vllm_specrollout.config.checks import check_choice
from vllm_specrollout.errors import ConfigError, SpecRolloutError

STUDIES: dict[str, tuple[type[Inputs], Callable[[Any, int], StudyReport]]] = {
    "tlt-table-4": (tlt.Table4Inputs, tlt.run_table_4),
    "specactor": (specactor.SpecActorInputs, specactor.run),
    "rhymerl": (rhymerl.RhymeRLInputs, rhymerl.run),
    "fastgrpo": (fastgrpo.FastGrpoInputs, fastgrpo.run),
    "what-if": (what_if.WhatIfInputs, what_if.run),
}
"""Name -> its inputs, and what runs it, whose documentation's first line says what it reproduces."""


def bench_study(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="See `--list`.", show_default=False)] = None,
    list_studies: Annotated[bool, typer.Option("--list", help="Say which studies there are.")] = False,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    inputs: Annotated[Path | None, typer.Option(help="A TOML file of inputs that are to differ.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write inputs and results to this file.")] = None,
) -> None:
    """Simulate a published experiment event by event: our figures beside the paper's."""
    console = Console(markup=False, highlight=False)
    if list_studies:
        for name, (_, run) in STUDIES.items():
            console.print(f"{name:<16}{(run.__doc__ or '').splitlines()[0]}", soft_wrap=True)
        return
    if study is None:
        raise ConfigError("no STUDY was named", f"choose from: {', '.join(STUDIES)}")
    flags.in_range(seed, "--seed", 0, 2**32 - 1)
    flags.check_writable(out, "--out")
    given = read_inputs(study, inputs)
    report = _run(study, given, seed, inputs)
    values = msgspec.to_builtins(given)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=160)
    _print(report, values, console)
    if out is not None:
        body = {"study": study, "seed": seed, "inputs": values, **msgspec.to_builtins(report)}
        out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {out}")


def read_inputs(study: str, path: Path | None = None) -> Inputs:
    """The shipped inputs of a study, and in their place those of a file.

    Raises:
        ConfigError: no such study, or a file that holds what is no input of it.
    """
    check_choice("STUDY", study, tuple(STUDIES))
    kind = STUDIES[study][0]
    if path is None:
        return kind()
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"`{path}` is no TOML file of inputs: {error}", f"`{study}` has: {known}") from None


def _run(study: str, given: Inputs, seed: int, path: Path | None) -> StudyReport:
    try:
        return STUDIES[study][1](given, seed)
    except SpecRolloutError:
        raise
    except (ArithmeticError, ValueError, IndexError) as error:
        # shipped values work, so this is a value of the user's that no study can use
        if path is None:
            raise
        raise ConfigError(f"`{path}` cannot be simulated: {error}", "change one value at a time") from error


def _print(report: StudyReport, values: dict[str, Any], out: Console) -> None:
    out.print(f"{report.title}\n")
    shown = (f"{name} {', '.join(f'{one:g}' for one in _listed(value))}" for name, value in values.items())
    out.print(f"inputs: {'; '.join(shown)}")
    for table in report.tables:
        out.print(f"\n{table.title}")
        out.print(_table(table))
    out.print()
    for finding in report.findings:
        out.print(f"- {finding}", soft_wrap=True)


def _listed(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _table(result: ResultTable) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in result.columns:
        table.add_column(title, justify="left" if title == result.columns[0] else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else cell for cell in row))
    return table
