"""What the loop found: per step and engine, and summed up per epoch. Pure.

Answers of our engine are those of stock, or the step says where they part, and then no speed is told: there is none of
a wrong answer. vLLM's own speculation does not sample what it samples without (with the same seeds), so of it only
times and counts are compared, and times per generated token, since its answers are as long as they happen to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runner.engines import STOCK

SUFFIX = "suffix"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One engine's rollout of one step."""

    engine: str
    # begin of the first request to the end of the last
    wall_s: float
    # engine steps
    steps: int
    num_tokens: int
    reward: float
    # requests whose tokens are not stock's
    num_differing: int
    # ours: whether none differs, as promised; None: nothing is promised
    identical: bool | None
    # the first difference, where identical is False
    difference: str | None
    # processor seconds per second that all other engines' processes took meanwhile
    idle_cores: float
    # draft tokens verified, and those of them kept; ours only
    drafted: int | None
    accepted: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of the loop: a rollout in every engine, then an update from stock's."""

    step: int
    epoch: int
    weights_version: int
    # mean over stock's answers; it is their accuracy, since an answer earns 1 or 0
    reward: float
    # share of problems with a right answer
    solved: float
    # mean tokens of an answer
    mean_tokens: float
    # share of answers cut off
    cut_share: float
    runs: tuple[EngineRun, ...]
    # of bench/policy/grpo.py::UpdateStats
    update: Mapping[str, Any]
    train_s: float
    # writing, inflating and loading the new weights, all engines; 0 after the last step
    push_s: float
    # largest difference of the inflated policy's logits, relative to the largest logit; None: not inflated
    inflation_error: float | None

    @property
    def identical(self) -> bool:
        """Whether none of ours differs."""
        return all(run.identical is not False for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEpoch:
    """One engine's rollouts of one epoch, or of several."""

    engine: str
    wall_s: float
    steps: int
    num_tokens: int
    # per engine step
    tokens_per_step: float
    # seconds per generated token of stock (of suffix) over this engine's; None: outputs differ, or there is none
    speedup: float | None
    speedup_on_suffix: float | None
    # None: nothing is promised
    identical: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """All steps of one epoch."""

    # "1", "2", ..., or the name of several
    epoch: str
    reward: float
    solved: float
    engines: tuple[EngineEpoch, ...]


def epoch_rows(steps: Sequence[StepRow]) -> list[EpochRow]:
    """One row per epoch; then one of all epochs, and one of all but the first, in which no history can help."""
    last = max(step.epoch for step in steps)
    rows = [sum_up(str(epoch + 1), [step for step in steps if step.epoch == epoch]) for epoch in range(last + 1)]
    if last > 0:
        rows.append(sum_up("all", steps))
        rows.append(sum_up("2 on", [step for step in steps if step.epoch > 0]))
    return rows


def sum_up(name: str, steps: Sequence[StepRow]) -> EpochRow:
    """One row of some steps, each engine's times and counts summed."""
    runs = {run.engine: [r for step in steps for r in step.runs if r.engine == run.engine] for run in steps[0].runs}
    s_per_token = {engine: _seconds_per_token(own) for engine, own in runs.items()}
    engines = tuple(_engine_epoch(engine, own, s_per_token) for engine, own in runs.items())
    return EpochRow(
        epoch=name,
        reward=sum(step.reward for step in steps) / len(steps),
        solved=sum(step.solved for step in steps) / len(steps),
        engines=engines,
    )


def _engine_epoch(engine: str, runs: Sequence[EngineRun], s_per_token: Mapping[str, float]) -> EngineEpoch:
    promised = [run.identical for run in runs if run.identical is not None]
    identical = all(promised) if promised else None
    steps, tokens = sum(run.steps for run in runs), sum(run.num_tokens for run in runs)

    def against(other: str) -> float | None:
        if identical is False or other not in s_per_token or other == engine:
            return None
        return s_per_token[other] / s_per_token[engine]

    return EngineEpoch(
        engine=engine,
        wall_s=sum(run.wall_s for run in runs),
        steps=steps,
        num_tokens=tokens,
        tokens_per_step=tokens / steps,
        speedup=against(STOCK),
        speedup_on_suffix=against(SUFFIX),
        identical=identical,
    )


def _seconds_per_token(runs: Sequence[EngineRun]) -> float:
    return sum(run.wall_s for run in runs) / sum(run.num_tokens for run in runs)
