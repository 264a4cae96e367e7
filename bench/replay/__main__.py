"""`python -m vllm_specrollout.bench.replay agreement | traces`."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_specrollout import cli_flags as flags
from vllm_specrollout.replay_cli import strategies

from ..runner.display import Display, main
from ..runner.models import CACHE, find_model
from .agreement import RECORDED, compare
from .make_traces import TRACES, make
from .rollouts import Rollout

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.command()
def traces(
    folder: Path, only: Annotated[str, typer.Option(help="Traces, with commas between them.")] = ",".join(TRACES)
) -> None:
    """Make the traces of tests/traces again."""
    names = flags.names(only, "--only", tuple(TRACES))
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, names, print)


@app.command()
def agreement(
    strategy: Annotated[str, typer.Option(help="Budgets, with commas between them, or `all`.")] = "all",
    prompts: Annotated[int, typer.Option(help="Problems.")] = 16,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 4,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed passes; the median errors count.")] = 3,
    size: Annotated[str | None, typer.Option(help="Inflate the policy to this size.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file.")] = None,
) -> None:
    """Run every budget in rounds on one engine, replay each on its round's recording, and compare the makespans."""
    with Display() as display:
        model, title = find_model(None, size, "bfloat16", CACHE, display, is_policy=True)
    rollout = Rollout(prompts=prompts, samples=samples, batch=batch, model=model)
    rows = compare(strategies(strategy), rollout, rounds, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{title}: {prompts} problems x {samples} answers, {batch} at once, recorded with {RECORDED}")
    print(f"{'budget':<12}{'error':>8}   predicted / measured s, per round")
    for row in rows:
        rounds_s = zip(row.predicted_s, row.measured_s, strict=True)
        times = "  ".join(f"{predicted:.2f}/{measured:.2f}" for predicted, measured in rounds_s)
        print(f"{row.name:<12}{row.error:>+8.1%}   {times}")
    if json is not None:
        values = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
        json.write_text(json_module.dumps(values, indent=1) + "\n", encoding="utf-8")


# the engines' processes import this file again under another name
if __name__ == "__main__":
    main(app)
