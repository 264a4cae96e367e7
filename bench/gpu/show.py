"""Tables: what would run, and what was found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..kernels import attention, verdict
from ..kernels.timing import Time
from . import engines, graphs

Columns = dict[str, Callable[[Any], str]]


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def time(value: Time | None) -> str:
    """Median microseconds, and half the distance of the quartiles."""
    return "-" if value is None else f"{value.median_us:.1f} ±{(value.high_us - value.low_us) / 2:.1f}"


def table(console: Console, title: str, rows: Sequence[Any], columns: Columns) -> None:
    """One line per row; nothing at all without rows."""
    if not rows:
        return
    made = Table(title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        made.add_row(*(show(row) for show in columns.values()))
    console.print(made)


def attention_table(console: Console, rows: Sequence[attention.Row]) -> None:
    columns: Columns = {
        "shape": lambda row: f"{row.model} {row.kind} {row.nodes}",
        "batch": lambda row: str(row.batch),
        "context": lambda row: str(row.context),
        "ours us": lambda row: time(row.ours),
        "FA3 us": lambda row: time(row.fa3),
        "flex us": lambda row: time(row.flex),
        "roof us": lambda row: number(row.roof_us, digits=1),
        "of roof": lambda row: number(row.of_roof),
        "x FA3": lambda row: number(row.over_fa3),
    }
    table(console, "Tree attention, one layer, median and half of the quartiles' distance", rows, columns)


def verdict_table(console: Console, rows: Sequence[verdict.Row]) -> None:
    columns: Columns = {
        "model": lambda row: row.model,
        "batch": lambda row: str(row.batch),
        "nodes": lambda row: str(row.nodes),
        "verify us": lambda row: time(row.verify),
        "roof us": lambda row: number(row.verify_roof_us, digits=1),
        "commit us": lambda row: time(row.commit),
        "commit roof us": lambda row: number(row.commit_roof_us, digits=1),
    }
    table(console, "Judging and committing a step", rows, columns)


def engine_table(console: Console, rows: Sequence[engines.Result]) -> None:
    columns: Columns = {
        "run": lambda found: f"{found.model} {found.row.name}",
        "batch": lambda found: str(found.row.batch),
        "context": lambda found: str(found.context),
        "identical": _identical,
        "speed-up": lambda found: number(found.row.speedup, "x"),
        "decode only": lambda found: number(found.row.decode_speedup, "x"),
        "tokens/step": lambda found: number(found.row.output_tokens / found.row.batch / found.row.steps),
        "steps": lambda found: f"{found.row.stock_steps} -> {found.row.steps}",
        "makespan s": lambda found: f"{number(found.row.stock_makespan_s)} -> {number(found.row.makespan_s)}",
    }
    table(console, "Engines, against stock vLLM without speculation", rows, columns)
    for found in rows:
        if not found.row.identical:
            console.print(
                f"{found.model} {found.row.name}, batch {found.row.batch}, context {found.context}:"
                f" {found.row.difference}",
                markup=False,
            )
    splits = [found for found in rows if found.split]
    names = sorted({name for found in splits for name in found.split or {} if name.endswith("_ms")})
    shares: Columns = {
        "run": lambda found: f"{found.model} {found.row.name}",
        "batch": lambda found: str(found.row.batch),
        "context": lambda found: str(found.context),
        **{name: functools.partial(_share, name) for name in names},
    }
    table(console, "Where a step's time goes, milliseconds per step in the worker", splits, shares)


def _share(name: str, found: engines.Result) -> str:
    return number((found.split or {}).get(name), digits=3)


def _identical(found: engines.Result) -> str:
    if found.compared is None:
        return "not compared"
    if not found.row.identical:
        return "NO"
    return "yes" if not found.ties else f"but {found.ties} ties in {found.compared}"


def graph_table(console: Console, rows: Sequence[graphs.Row], model: str) -> None:
    columns: Columns = {
        "engine": lambda row: f"{model} {row.name}",
        "device MiB": lambda row: number(row.device_mib, digits=0),
        "graphs for drafts MiB": lambda row: number(row.graphs_mib, digits=0),
        "logged MiB": lambda row: number(row.logged_mib, digits=0),
        "estimate MiB": lambda row: number(row.estimated_mib, digits=0),
    }
    table(console, "CUDA graphs", rows, columns)


def notes(console: Console, lines: Sequence[str]) -> None:
    for line in dict.fromkeys(lines):
        console.print(f"note: {line}", markup=False, highlight=False)
