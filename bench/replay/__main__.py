"""`python -m vllm_specrollout.bench.replay agreement | traces`."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllm_specrollout.cli import flags
from vllm_specrollout.cli.replay import run_all, strategies
from vllm_specrollout.replay.files import read_trace, write_trace

from ..runner.display import Display, main
from ..runner.models import CACHE, find_model
from .rollouts import RolloutPlan, at_once, run, set_budget, start, warm_up

RECORDED = "auto"  # its steps have drafts of all sizes, and none: what each costs is seen, not extrapolated
_BOTH = ("history", "ngram")
TRACES = {
    # nothing is known of any problem yet: siblings and the answer itself draft
    "early_epoch": RolloutPlan(prompts=12, samples=4, batch=8, seed=11, noise=(1,), drafters=_BOTH),
    # the third pass over the same problems, with other noise
    "late_epoch": RolloutPlan(prompts=12, samples=4, batch=8, seed=11, noise=(1, 2, 3), drafters=_BOTH),
    # many short answers and four very long ones: most of the time the batch is nearly empty
    "long_tail": RolloutPlan(prompts=18, samples=2, batch=16, seed=12, noise=(1,), drafters=_BOTH, long=2),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.command()
def traces(
    folder: Path, only: Annotated[str, typer.Option(help="Traces, with commas between them.")] = ",".join(TRACES)
) -> None:
    """Make the traces of tests/traces again."""
    # times differ between hosts, so files do too; answers and proposals do not
    names = flags.names(only, "--only", tuple(TRACES))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        rollout, path = TRACES[name], folder / f"{name}.jsonl.zst"
        with tempfile.TemporaryDirectory() as history:
            for noise in rollout.noise:
                # an engine for each pass: what it leaves on disk is what the next one knows
                with start(rollout, "fixed", Path(history)) as engine:
                    engine.ask("trainer", function="begin_epoch")
                    warm_up(engine, rollout)
                    if noise == rollout.noise[-1]:
                        set_budget(engine, "fixed", path)
                    run(engine, rollout, noise)
                    set_budget(engine, "off")
        trace = at_once(read_trace(path))
        header = msgspec.structs.replace(trace.header, model="packages/policy/checkpoint")
        write_trace(path, dataclasses.replace(trace, header=header))
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


@app.command()
def agreement(
    strategy: Annotated[str, typer.Option(help="Budgets, with commas between them, or `all`.")] = "all",
    prompts: Annotated[int, typer.Option(help="Problems.")] = 16,
    samples: Annotated[int, typer.Option(help="Answers to each problem.")] = 4,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed passes; the median errors count.")] = 3,
    size: Annotated[str | None, typer.Option(help="Inflate the policy to this size.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
) -> None:
    """Run every budget in rounds on one engine, replay each on its round's recording, and compare the makespans."""
    with Display() as display:
        model, title = find_model(None, size, "bfloat16", CACHE, display, is_policy=True)
    rows = compare(
        strategies(strategy), RolloutPlan(prompts=prompts, samples=samples, batch=batch, model=model), rounds
    )
    print(f"{title}: {prompts} problems x {samples} answers, {batch} at once, recorded with {RECORDED}")
    print(f"{'budget':<12}{'error':>8}   predicted / measured s, per round")
    for row in rows:
        rounds_s = zip(row.predicted_s, row.measured_s, strict=True)
        times = "  ".join(f"{predicted:.2f}/{measured:.2f}" for predicted, measured in rounds_s)
        print(f"{row.name:<12}{row.error:>+8.1%}   {times}")
    if out is not None:
        values = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
        out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One budget, foretold and measured."""

    name: str
    # per round: what the replay of that round's recording says, and the engine's makespan
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """Median over the rounds."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return statistics.median(predicted / measured for predicted, measured in pairs) - 1.0


def compare(names: Sequence[str], rollout: RolloutPlan, rounds: int) -> list[Agreement]:
    """One engine runs all budgets in turn; each pass with a fresh one, as replays have it, and one of them recorded.

    A host's speed drifts, and two engines on it differ. So each round holds every budget once, the rounds go through
    them both ways, and what a round measured is compared with what its own recording foretells.
    """
    arms = list(names) if RECORDED in names else [RECORDED, *names]
    measured: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, start(rollout, RECORDED) as engine:
        paths = [Path(folder) / f"{number}.jsonl.zst" for number in range(rounds)]
        warm_up(engine, rollout)
        for number, path in enumerate(paths):
            seconds: dict[str, float] = {}
            for name in arms if number % 2 == 0 else reversed(arms):
                _tell(f"round {number + 1} of {rounds}: {name}")
                set_budget(engine, name, path if name == RECORDED else None)
                seconds[name] = run(engine, rollout, rollout.noise[-1])
            measured.append(seconds)
        # completes the last recording
        set_budget(engine, "off")
        _tell("replaying")
        predicted = [run_all(at_once(read_trace(path)), names) for path in paths]
    return [
        Agreement(
            name=name,
            predicted_s=tuple(one[name].makespan_ms / 1e3 for one in predicted),
            measured_s=tuple(one[name] for one in measured),
        )
        for name in names
    ]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# the engines' processes import this file again under another name
if __name__ == "__main__":
    main(app)
