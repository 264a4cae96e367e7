"""The tables of a loop."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..runner.engines import OURS, STOCK
from .rows import SUFFIX, EngineEpoch, EpochRow, StepRow


def print_epochs(rows: Sequence[EpochRow], console: Console) -> None:
    """One line per epoch: reward, and per engine its time, steps and ratios."""
    table = Table(pad_edge=False)
    table.add_column("epoch", no_wrap=True)
    for title in ("identical", "reward", "solved"):
        table.add_column(title, justify="right", no_wrap=True)
    has_suffix = any(engine.engine == SUFFIX for engine in rows[0].engines)
    for engine in rows[0].engines:
        table.add_column(f"{engine.engine}\ns (steps)", justify="right", no_wrap=True)
        if engine.engine != STOCK:
            table.add_column("x stock", justify="right", no_wrap=True)
        if has_suffix and engine.identical is not None:
            table.add_column("x suffix", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.epoch, _identical(row.engines), f"{row.reward:.3f}", f"{row.solved:.2f}"]
        for engine in row.engines:
            seconds = "-" if engine.identical is False else f"{engine.wall_s:.1f}"
            cells.append(f"{seconds} ({engine.steps})")
            if engine.engine != STOCK:
                cells.append(_ratio(engine.speedup))
            if has_suffix and engine.identical is not None:
                cells.append(_ratio(engine.speedup_on_suffix))
        table.add_row(*cells)
    console.print(table)


def print_ablation(rows: Sequence[EpochRow], console: Console) -> None:
    """One line per variant of ours: all epochs, and all but the first."""
    summary = {row.epoch: {engine.engine: engine for engine in row.engines} for row in rows}
    whole, later = summary.get("all", summary["1"]), summary.get("2 on", summary["1"])
    base = later.get(OURS)
    table = Table(pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for title in ("identical", "x stock, all", "from epoch 2", "steps, all", "from epoch 2", "tokens/step", "x ours"):
        table.add_column(title, justify="right")
    for name, engine in later.items():
        if engine.identical is None:
            continue
        told = base is not None and base.speedup and engine.speedup
        table.add_row(
            name,
            "yes" if whole[name].identical else "NO",
            _ratio(whole[name].speedup),
            _ratio(engine.speedup),
            str(whole[name].steps),
            str(engine.steps),
            f"{engine.tokens_per_step:.2f}",
            _ratio(engine.speedup / base.speedup) if told else "-",
        )
    console.print(table)


def print_notes(steps: Sequence[StepRow], notes: Sequence[str], console: Console) -> None:
    """What the tables do not say."""
    runs = [run for step in steps for run in step.runs]
    for name in dict.fromkeys(run.engine for run in runs if run.identical is None and run.engine != STOCK):
        own = [run for run in runs if run.engine == name]
        differing, tokens = sum(run.num_differing for run in own), sum(run.num_tokens for run in own)
        console.print(
            f"{name}: vLLM's own speculation, not seed-identical; {differing} answers differ from stock's,"
            f" {tokens} tokens: its ratios are per generated token",
            markup=False,
        )
    for step in steps:
        for run in step.runs:
            if run.difference is not None:
                console.print(f"step {step.step + 1}, {run.engine} DIFFERS: {run.difference}", markup=False)
    busiest = max(run.idle_cores for run in runs)
    console.print(
        f"idle engines took at most {busiest:.3f} of a core while another ran; updates took"
        f" {sum(step.train_s for step in steps):.0f} s, pushing weights {sum(step.push_s for step in steps):.0f} s",
        markup=False,
    )
    for note in notes:
        console.print(note, markup=False)


def _identical(engines: Sequence[EngineEpoch]) -> str:
    promised = [engine.identical for engine in engines if engine.identical is not None]
    return "-" if not promised else "yes" if all(promised) else "NO"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
