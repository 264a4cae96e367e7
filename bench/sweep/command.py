"""`specrollout bench sweep`: flags in; a line per cell, table, picture and JSON out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.errors import ConfigError

from ..common import flags
from ..common.display import Display
from ..common.models import CACHE, CHECKPOINT, check_length, check_model, inflated_policy, random_model_of
from ..common.report import check_writable, make_report
from ..common.tuned import Engines
from ..rollout.command import _check_plot
from .measure import run_sweep
from .plan import Plan, SweepRow, summary
from .plot import plot

_DEFAULT = Plan()


def bench_sweep(
    size: Annotated[
        str | None, typer.Option(help="Random weights of this size (default: 150M); or the policy's.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model's folder, instead of random weights.")] = None,
    policy: Annotated[
        bool, typer.Option("--policy", help="The project's policy with its real drafters, instead of the oracle.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Requests at once.")] = ",".join(map(str, _DEFAULT.batches)),
    accuracy: Annotated[str, typer.Option(help="Probabilities that a draft token is right.")] = ",".join(
        map(str, _DEFAULT.accuracies)
    ),
    draft: Annotated[str, typer.Option(help="Fixed draft lengths.")] = ",".join(map(str, _DEFAULT.drafts)),
    tokens: Annotated[int | None, typer.Option(help="Tokens per request; default: 20 to 64, by batch.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds; the medians are reported.")] = _DEFAULT.rounds,
    seed: Annotated[int, typer.Option(help="Of the first request's noise; the others' follow.")] = _DEFAULT.seed,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = _DEFAULT.dtype,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Draw the speed-ups into this file.")] = None,
    kv_gib: Annotated[int, typer.Option(help="GiB of KV cache of each engine.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where models are kept.", show_default=False)] = CACHE,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Compare `auto` with stock and with every fixed draft length, at many batches and qualities of drafts."""
    if model is not None and (policy or size is not None):
        raise ConfigError("`--model` is given beside `--policy` or `--size`", "give `--model` alone")
    plan = Plan(
        batches=flags.integers(batch, "--batch", 1, 256),
        accuracies=() if policy else each_probability(accuracy),
        drafts=flags.integers(draft, "--draft", 1, MAX_NODES),
        tokens=tokens,
        rounds=rounds,
        seed=seed,
        dtype=dtype,
    )
    check_writable(json, "--json")
    _check_plot(plot_to)
    with Display() as display, tempfile.TemporaryDirectory() as scratch:
        folder, title = find_model(model, size, dtype, cache, display, is_policy=policy)
        check_length(folder, plan.max_model_len())
        advance = display.steps(len(plan.cells()))
        advance("starting the engines", 0)
        arguments, config = plan.engine_arguments(folder), plan.spec_rollout()
        with Engines(arguments, config, Path(scratch), kv_gib=kv_gib, is_verbose=verbose) as engines:
            rows = run_sweep(plan, engines, advance, lambda own: _print_cell(own, display.out))
    found = summary(rows)
    report = make_report("sweep", {"model": title, **plan.as_dict()}, rows, {"summary": found})
    _print_summary(found, display.out)
    if plot_to is not None:
        plot(rows, f"{title}, {dtype}", plot_to)
        display.out.print(f"wrote {plot_to}", markup=False)
    if json is not None:
        json.write_text(report.as_json(), encoding="utf-8")
        display.out.print(f"wrote {json}", markup=False)


def find_model(
    model: Path | None, size: str | None, dtype: str, cache: Path, display: Display, *, is_policy: bool
) -> tuple[Path, str]:
    """The model's folder and its title; made if it is not there yet."""
    if model is not None:
        return check_model(model, "--model"), model.resolve().name
    if not is_policy:
        size = size or "150M"
        return random_model_of(size, dtype, cache, display.counter("making the model")), f"random weights, {size}"
    check_model(CHECKPOINT, "--model")
    if size is None:
        return CHECKPOINT, "the project's policy"
    counter = display.counter(f"inflating the policy to {size}")
    return inflated_policy(CHECKPOINT, size, cache, counter), f"the project's policy, inflated to {size}"


def each_probability(text: str) -> tuple[float, ...]:
    """`0.5,0.9` -> (0.5, 0.9), each one on its own, in the order given.

    Raises:
        ConfigError: not a list of different numbers from 0 to 1.
    """
    values = tuple(flags.probabilities(part, "--accuracy")[0] for part in text.split(","))
    if len(set(values)) != len(values):
        raise ConfigError(f"`--accuracy` is {text!r}, which holds a value twice", "name each value once")
    return values


def _print_cell(rows: Sequence[SweepRow], out: Console) -> None:
    auto = rows[0]
    where = f"batch {auto.batch:3d}" + ("" if auto.accuracy is None else f"  accuracy {auto.accuracy:.2f}")
    if auto.speedup is None or auto.auto_to_best is None:
        reason = next((row.difference for row in rows if not row.identical), "no fixed draft length ran")
        out.print(f"{where}  not comparable: {reason}", markup=False, highlight=False)
        return
    fixed = "  ".join(f"{row.draft}: {row.speedup:.2f}x" for row in rows[1:] if row.speedup is not None)
    best = f"auto/best fixed ({auto.best_draft}) {auto.auto_to_best:.2f}"
    out.print(
        f"{where}  auto {auto.speedup:.2f}x  fixed {fixed}  {best}",
        markup=False,
        highlight=False,
    )


def _print_summary(found: dict[str, Any], out: Console) -> None:
    for key, title in (("to_stock", "auto / stock"), ("to_best_fixed", "auto / best fixed")):
        worst = found[key]
        if worst is None:
            out.print(f"{title}: nothing to compare", markup=False)
            continue
        where = f"batch {worst['batch']}" + ("" if worst["accuracy"] is None else f", accuracy {worst['accuracy']:g}")
        verdict = "met" if worst["is_met"] else f"NOT met in {worst['num_below']} of {found['num_cells']} cells"
        out.print(f"{title}: worst {worst['worst']:.3f} ({where}); at least {found['limit']}: {verdict}", markup=False)
    if found["num_not_comparable"]:
        out.print(f"{found['num_not_comparable']} of {found['num_cells']} cells are not comparable", markup=False)
