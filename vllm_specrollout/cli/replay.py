"""`specrollout replay`: traces in; a table of budgets and JSON out. Needs neither vLLM nor torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_specrollout.budgets.registry import make_budget, names
from vllm_specrollout.cli import flags
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.by_name import check_name
from vllm_specrollout.replay.cost import cost_of
from vllm_specrollout.replay.files import read_trace
from vllm_specrollout.replay.records import Trace
from vllm_specrollout.replay.simulate import Result, replay


def replay_command(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Recorded rollouts.", show_default=False)],
    strategy: Annotated[str, typer.Option(help="Budgets, with commas; or `all`; also `my.module:Class`.")] = "all",
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the budgets that draw lots.")] = 0,
) -> None:
    """Run budgets on recorded rollouts again, without an engine: who would have been done first?"""
    chosen = strategies(strategy)
    flags.check_writable(out, "--out")
    console = Console(markup=False, highlight=False)
    rows = list[dict[str, Any]]()
    for path in traces:
        trace = read_trace(path)
        found = run_all(trace, chosen, seed)
        _print(path, trace, chosen, found, console)
        rows += [_row(name, path.name, found[name]) for name in chosen]
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {out}")


def strategies(text: str) -> tuple[str, ...]:
    """`auto,das` -> ("auto", "das"); `all` -> every budget there is.

    Raises:
        ConfigError: a name that no budget has.
    """
    if text.strip() == "all":
        return names()
    chosen = tuple(part.strip() for part in text.split(","))
    for name in chosen:
        check_name("--strategy", name, names())
    return tuple(dict.fromkeys(chosen))


def run_all(trace: Trace, budgets: Sequence[str], seed: int = 0) -> dict[str, Result]:
    """Each budget, fresh, on one trace; and `off`, which the others are compared with.

    Raises:
        TraceError: the trace cannot be replayed.
    """
    header, cost = trace.header, cost_of(trace)
    results = {}
    for name in dict.fromkeys((*budgets, "off")):
        config = SpecRolloutConfig(
            budget=name, max_draft_tokens=header.max_draft_tokens, max_depth=header.max_depth, shape=header.shape
        )
        results[name] = replay(trace, make_budget(config, seed=seed), cost)
    return results


def _row(name: str, trace: str, result: Result) -> dict[str, Any]:
    """One budget on one trace, as JSON."""
    return {
        "name": name,
        "trace": trace,
        "busy_s": round(result.busy_ms / 1e3, 6),
        # tokens of a running request per decode step
        "tokens_per_step": round(result.tokens_per_step, 4),
        # draft nodes verified in vain
        "wasted_nodes": result.wasted_nodes,
        "steps": result.steps,
        # steps that verified no draft
        "steps_off": result.steps_off,
    }


def _print(path: Path, trace: Trace, chosen: Sequence[str], results: dict[str, Result], out: Console) -> None:
    header = trace.header
    answers = [trace.ends[a.request] for a in trace.arrivals if a.request in trace.ends]
    tokens = sum(len(end.token_ids) for end in answers)
    out.print(
        f"{path.name}: {len(answers)} answers, {tokens} tokens, {header.max_num_seqs} at once,"
        f" recorded with {header.budget}, at most {header.max_draft_tokens} nodes"
    )
    lost = len(trace.arrivals) - len(answers)
    if trace.is_cut or lost:
        cut = "the file stops in the middle; " if trace.is_cut else ""
        out.print(f"warning: {cut}{lost} answers have no end and are left out")
    table = Table(box=None, pad_edge=False)
    for title in ("budget", "busy s", "tokens/step", "wasted nodes", "steps", "steps off", "vs off"):
        table.add_column(title, justify="left" if title == "budget" else "right")
    plain = results["off"].busy_ms
    for name in chosen:
        row = results[name]
        table.add_row(
            name,
            f"{row.busy_ms / 1e3:.3f}",
            f"{row.tokens_per_step:.2f}",
            str(row.wasted_nodes),
            str(row.steps),
            str(row.steps_off),
            f"{plain / row.busy_ms:.2f}x",
        )
    out.print(table)
    recorded = results.get(header.budget)
    measured = trace.measured_ms()
    if recorded is not None and measured > 0.0:
        error = recorded.busy_ms / measured - 1.0
        out.print(
            f"{header.budget}: predicted {recorded.busy_ms / 1e3:.3f} s, measured {measured / 1e3:.3f} s ({error:+.1%})"
        )
    out.print()
