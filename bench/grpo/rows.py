"""Findings of the loop, per step and engine, and summed up per epoch; and the tables of them.

Answers of our engine are those of stock, or the step says where they part, and then no speed is told: there is none of
a wrong answer. vLLM's own speculation does not sample what it samples without (with the same seeds), so of it only
times and counts are compared, and times per generated token, since its answers are as long as they happen to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..runner.engines import STOCK
from ..runner.fields import Row, number
from ..runner.report import Table


def step_row(runs: Sequence[Row], **told: Any) -> Row:
    """One step of the loop: a rollout in every engine, then an update from stock's; identical if none of ours differs.

    A run is one engine's rollout; its `identical` is None where nothing is promised.
    """
    return Row(**{**told, "identical": all(run.identical is not False for run in runs), "runs": list(runs)})


def epoch_rows(steps: Sequence[Row]) -> list[Row]:
    """One row per epoch; then one of all epochs, and one of all but the first, in which no history can help."""
    last = max(step.epoch for step in steps)
    rows = [sum_up(str(epoch + 1), [step for step in steps if step.epoch == epoch]) for epoch in range(last + 1)]
    if last > 0:
        rows.append(sum_up("all", steps))
        rows.append(sum_up("2 on", [step for step in steps if step.epoch > 0]))
    return rows


def sum_up(name: str, steps: Sequence[Row]) -> Row:
    """One row of some steps, each engine's times and counts summed."""
    runs = {run.engine: [r for step in steps for r in step.runs if r.engine == run.engine] for run in steps[0].runs}
    s_per_token = {
        engine: sum(run.wall_s for run in own) / sum(run.num_tokens for run in own) for engine, own in runs.items()
    }
    return Row(
        epoch=name,
        reward=sum(step.reward for step in steps) / len(steps),
        solved=sum(step.solved for step in steps) / len(steps),
        engines=[_engine_epoch(engine, own, s_per_token) for engine, own in runs.items()],
    )


def _engine_epoch(engine: str, runs: Sequence[Row], s_per_token: Mapping[str, float]) -> Row:
    identical = _identical(runs)
    steps, tokens = sum(run.steps for run in runs), sum(run.num_tokens for run in runs)

    is_told = identical is not False and engine != STOCK
    return Row(
        engine=engine,
        wall_s=sum(run.wall_s for run in runs),
        steps=steps,
        num_tokens=tokens,
        tokens_per_step=tokens / steps,
        speedup=s_per_token[STOCK] / s_per_token[engine] if is_told else None,
        identical=identical,
    )


def epochs_table(rows: Sequence[Row]) -> Table:
    """One line per epoch: reward, and per engine its time, steps and ratios."""
    columns: dict[str, Any] = {
        "epoch": "epoch",
        "identical": lambda row: _identical(row.engines),
        "reward": lambda row: f"{row.reward:.3f}",
        "solved": "solved",
    }
    for i, engine in enumerate(rows[0].engines):
        columns[f"{engine.engine}\ns (steps)"] = lambda row, i=i: _seconds(row.engines[i])
        if engine.engine != STOCK:
            columns[f"{engine.engine}\nx stock"] = lambda row, i=i: number(row.engines[i].speedup, "x")
    return Table(rows, columns, left=len(columns))


def _seconds(engine: Row) -> str:
    return f"{'-' if engine.identical is False else f'{engine.wall_s:.1f}'} ({engine.steps})"


def notes_text(steps: Sequence[Row], notes: Sequence[str]) -> Iterator[str]:
    """What the tables do not say."""
    runs = [run for step in steps for run in step.runs]
    for name in dict.fromkeys(run.engine for run in runs if run.identical is None and run.engine != STOCK):
        own = [run for run in runs if run.engine == name]
        differing, tokens = sum(run.num_differing for run in own), sum(run.num_tokens for run in own)
        yield (
            f"{name}: vLLM's own speculation, not seed-identical; {differing} answers differ from stock's,"
            f" {tokens} tokens: its ratios are per generated token"
        )
    for step in steps:
        for run in step.runs:
            if run.difference is not None:
                yield f"step {step.step + 1}, {run.engine} DIFFERS: {run.difference}"
    yield (
        f"updates took {sum(step.train_s for step in steps):.0f} s,"
        f" pushing weights {sum(step.push_s for step in steps):.0f} s"
    )
    yield from notes


def _identical(found: Sequence[Row]) -> bool | None:
    """Whether all are that promised it; None: none did."""
    promised = [one.identical for one in found if one.identical is not None]
    return all(promised) if promised else None
