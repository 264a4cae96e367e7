"""The tables of a loop and its picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .plan import OURS, STOCK
from .rows import SUFFIX, EngineEpoch, EpochRow, StepRow

_KNOWN_COLOURS = {STOCK: "#8a8f98", OURS: "#1f77b4", "ngram": "#ff7f0e", SUFFIX: "#2ca02c"}
_COLOURS = ("#d62728", "#9467bd", "#8c564b", "#e377c2")


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
            cells.append(f"{engine.wall_s:.1f} ({engine.steps})")
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


def plot(steps: Sequence[StepRow], rows: Sequence[EpochRow], title: str, path: Path) -> None:
    """Reward by step, tokens per engine step by epoch, rollout time by step; the file's ending chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [run.engine for run in steps[0].runs]
    variants = [name for name in names if name not in _KNOWN_COLOURS]
    colours = _KNOWN_COLOURS | dict(zip(variants, itertools.cycle(_COLOURS), strict=False))
    figure, (rewards, tokens, times) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    numbers = [step.step + 1 for step in steps]
    for name in names:
        runs = [next(run for run in step.runs if run.engine == name) for step in steps]
        if name in (STOCK, OURS):
            # identical answers earn identical rewards: the line on top is drawn thin
            style = {"linewidth": 4.0, "alpha": 0.5} if name == STOCK else {"linewidth": 1.2}
            rewards.plot(numbers, [run.reward for run in runs], color=colours[name], label=name, **style)
        times.plot(numbers, [run.wall_s for run in runs], color=colours[name], label=name, linewidth=1.6)
        epochs = [row for row in rows if row.epoch.isdigit()]
        values = [next(e.tokens_per_step for e in row.engines if e.engine == name) for row in epochs]
        tokens.plot(
            [int(row.epoch) for row in epochs], values, color=colours[name], label=name, marker="o", markersize=3
        )
    rewards.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
    tokens.set(xlabel="epoch", ylabel="tokens per engine step", ylim=(0, None))
    times.set(xlabel="step", ylabel="rollout, seconds", ylim=(0, None))
    for axes in (rewards, tokens, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _identical(engines: Sequence[EngineEpoch]) -> str:
    promised = [engine.identical for engine in engines if engine.identical is not None]
    return "-" if not promised else "yes" if all(promised) else "NO"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
