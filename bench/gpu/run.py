"""The one command of the GPU measurements: kernels, graph memory, engines; tables last, one JSON file with it all."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_specrollout.errors import ConfigError, SpecRolloutError, UnsupportedError

from ..common import flags, report
from . import dry, graphs, show
from .engines import Engines
from .models import CONFIGS
from .plan import Plan, plans

PARTS = ("kernels", "graphs", "engine")
SCHEMA = 1
"""Changes when a field of gpu.json changes its meaning or goes away."""


def run(
    out: Annotated[Path, typer.Option(help="Folder for gpu.json; made if it does not exist.")],
    quick: Annotated[bool, typer.Option("--quick", help="Few shapes, few cells, the small model.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every shape and plan without a GPU; measure nothing.")
    ] = False,
    parts: Annotated[str, typer.Option(help="Which parts: kernels, graphs, engine.")] = ",".join(PARTS),
    models: Annotated[
        str | None, typer.Option(help="Engine models: 0.5B, 7B, tiny; default: both, quick: 0.5B.")
    ] = None,
    budget: Annotated[str, typer.Option(help="fixed drafts as told; auto drafts what pays.")] = "fixed",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log; graph sizes are then not read.")] = False,
) -> None:
    """Measure kernels, CUDA graphs and engines on one GPU against FlashAttention 3, FlexAttention and stock vLLM."""
    chosen = flags.names(parts, "--parts", PARTS)
    names = flags.names(models or ("0.5B" if quick else "0.5B,7B"), "--models", tuple(CONFIGS))
    flags.choice(budget, "--budget", ("fixed", "auto"))
    if out.exists() and not out.is_dir():
        raise ConfigError(f"`--out` is `{out}`, which is a file", "name a folder")
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    engine_plans = plans(names, quick, budget)
    if dry_run:
        _dry_run(console, chosen, names, engine_plans, quick)
        return
    _need_gpu()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        session = Session(out / "gpu.json", Path(scratch), quick, verbose)
        if "kernels" in chosen:
            session.part("kernels", session.kernels)
        if "graphs" in chosen:
            # of the largest model only: what differs between models is on file from the estimate
            session.part(f"graphs {names[-1]}", lambda: session.graphs(names[-1]))
        if "engine" in chosen:
            for plan in engine_plans:
                session.part(f"engine {plan.model}", functools.partial(session.engines, plan))
    for draw in session.tables:
        draw(console)
    show.notes(console, session.notes)
    console.print(f"wrote {session.path}", markup=False, highlight=False)
    if session.has_failed:
        raise typer.Exit(1)


def _dry_run(console: Console, chosen: tuple[str, ...], names: tuple[str, ...], made: list[Plan], quick: bool) -> None:
    items: list[dry.Item] = []
    with tempfile.TemporaryDirectory() as scratch:
        if "kernels" in chosen:
            items += dry.kernels(quick)
        if "graphs" in chosen:
            items += dry.graph_arms(names[-1], Path(scratch))
        if "engine" in chosen:
            items += dry.engines(made, Path(scratch))
    dry.show_plan(console, items)


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "no CUDA GPU can be used: torch finds none",
            "try `--dry-run` here, and run this beside a CUDA build of vLLM",
        )


class Session:
    """What was found so far; written after every part, so that a later failure loses nothing."""

    def __init__(self, path: Path, scratch: Path, is_quick: bool, is_verbose: bool) -> None:
        self.path, self._scratch = path, scratch
        self._is_quick, self._is_verbose = is_quick, is_verbose
        self.notes: list[str] = []
        self.tables: list[Callable[[Console], None]] = []
        # outputs that differ, kernels that are wrong, parts that ended early
        self.has_failed = False
        self._found: dict[str, Any] = {"kernels": {}, "graphs": {}, "engine": []}

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """Run one part; if it fails, say so, and go on with the next."""
        try:
            measure()
        except SpecRolloutError as error:
            self.notes.append(f"{name}: {error.cause}")
            self.has_failed = True
        finally:
            self._write()

    def kernels(self) -> None:
        import torch

        from ..kernels import attention, verdict
        from ..kernels.timing import Timer

        timer = Timer()
        self._say("copy bandwidth")
        bandwidth = timer.copy_bandwidth()
        rows = list(attention.measure(timer, bandwidth, self._is_quick, self._say))
        steps = list(verdict.measure(timer, bandwidth, self._is_quick, self._say))
        self._found["kernels"] = {
            "copy_bytes_per_s": bandwidth,
            "attention": [{**asdict(row), "of_roof": row.of_roof, "over_fa3": row.over_fa3} for row in rows],
            "verdict": [asdict(row) for row in steps],
        }
        self.notes += [note for row in (*rows, *steps) for note in row.notes]
        marks = ("is wrong", "cannot be imported", "ours: ")
        self.has_failed |= any(mark in note for note in self.notes for mark in marks)
        # the engines need the memory
        del timer
        torch.cuda.empty_cache()
        self.tables += [
            lambda console: console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, read and written"),
            lambda console: show.attention_table(console, rows),
            lambda console: show.verdict_table(console, steps),
        ]

    def graphs(self, name: str) -> None:
        rows = list(graphs.measure(name, self._scratch, self._say, is_verbose=self._is_verbose))
        self._found["graphs"][name] = [asdict(row) for row in rows]
        self.notes += [f"{name}, {row.name}: {row.note}" for row in rows if row.note]
        self.tables.append(lambda console: show.graph_table(console, rows, name))

    def engines(self, plan: Plan) -> None:
        with Engines(plan, self._scratch, self._say, is_verbose=self._is_verbose) as bench:
            # a table of what was done, also when the rest fails
            self.tables.append(lambda console: show.engine_table(console, bench.results))
            try:
                bench.run()
            finally:
                self._found["engine"] += [result.as_dict() for result in bench.results]
                self.notes += bench.notes
                self.has_failed |= not all(result.row.identical for result in bench.results)

    def _say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    def _write(self) -> None:
        body = {
            "schema": SCHEMA,
            "bench": "gpu",
            "host": {**report.host(), **_device()},
            "versions": report.versions(),
            "command": shlex.join(["python", "-m", "vllm_specrollout.bench.gpu", *sys.argv[1:]]),
            **self._found,
            "notes": list(dict.fromkeys(self.notes)),
        }
        self.path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _device() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
