"""`specrollout try --from RECORD`: what a rollout that is over would have gained, without an engine or a GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.cli.prompts import Tokenizer
from vllm_specrollout.config import parse
from vllm_specrollout.replay.anchors import ANCHORS
from vllm_specrollout.replay.dump import read_dump
from vllm_specrollout.replay.forecast import EpochForecast, StepTimes, forecast, step_times

FLAG = "--from"
MOST_BATCH = 4096


def try_from(
    record: Annotated[
        Path, typer.Option(FLAG, help="Prompts and answers, a line of JSON for each answer.", show_default=False)
    ],
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Whose tokenizer makes tokens of texts.", show_default=False)
    ] = "",
    batch: Annotated[int, typer.Option(help="Requests at once (max_num_seqs).")] = 64,
    steps: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What steps take: {' or '.join(ANCHORS)}, or a trace that your engine recorded; may come again.",
            show_default="all anchors",
        ),
    ] = None,
    spec_rollout: Annotated[str, typer.Option(help="What --spec-rollout would take, as JSON.")] = "{}",
    seed: Annotated[int, typer.Option(help="Of the budgets that draw lots.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
) -> None:
    """Replay a rollout that is over, and say what each epoch would have saved. Needs no engine and no GPU."""
    flags.in_range(batch, "--batch", 1, MOST_BATCH)
    flags.check_writable(out, "--out")
    config = parse(flags.json_object(spec_rollout, "--spec-rollout"))
    assert config is not None, "an object switches nothing off"
    times = [step_times(name) for name in steps or ANCHORS]
    rollouts = read_dump(record, Tokenizer(model).encode if model else None)
    found = {one.name: forecast(rollouts, config, one, batch, seed) for one in times}
    typer.echo(f"{record.name}: {len(rollouts)} rollouts, {batch} at once. Nothing was run: all times are predicted\n")
    _print(times, found)
    if out is not None:
        rows = [{"steps": name, **row_of(epoch)} for name, epochs in found.items() for epoch in epochs]
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {out}")


def row_of(epoch: EpochForecast) -> dict[str, Any]:
    """An epoch at one kind of step, as JSON."""
    return {**dataclasses.asdict(epoch), "speedup": epoch.speedup}


def _print(times: Sequence[StepTimes], found: dict[str, list[EpochForecast]]) -> None:
    titles = ("epoch", "answers", "tokens", "steps of", "steps", "tokens/step", "saved, s", "speed-up")
    rows = [
        (
            epoch.epoch,
            epoch.num_answers,
            epoch.num_tokens,
            one.name,
            f"{epoch.plain_steps} -> {epoch.ours_steps}",
            f"{epoch.tokens_per_step:.2f}",
            f"{(epoch.plain_ms - epoch.ours_ms) / 1e3:.1f} of {epoch.plain_ms / 1e3:.1f}",
            f"{epoch.speedup:.2f}x",
        )
        for one in times
        for epoch in found[one.name]
    ]
    flags.print_table(titles, rows)
    for one in times:
        typer.echo(f"{one.name}: {one.told}")
