"""What a sweep measures, in which order, and what its cells come to. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_specrollout.config import MAX_NODES

from ..common import flags
from ..common.models import DTYPES
from ..common.rows import Pair, Row, make_row
from ..common.tuned import AUTO, Budget
from ..rollout.plan import DRAFTERS

PROMPT_LEN = 64
"""Most tokens of a prompt: short, so that the runs are decoding."""
LIMIT = 0.97
"""The least of both ratios that passes: auto to stock, and auto to the best fixed draft length."""
HOPELESS = 0.85
"""Longer drafts are not tried in a cell where one reached less than this share of the best before it."""
_TOKENS = {1: 64, 2: 64, 4: 48, 8: 40, 16: 32, 32: 24}
_FEWEST_TOKENS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one `specrollout bench sweep`."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    # () where the real drafters draft
    accuracies: tuple[float, ...] = (0.5, 0.7, 0.9, 0.0)
    drafts: tuple[int, ...] = (1, 3, 7, 15)
    # of each request; None: chosen by batch
    tokens: int | None = None
    rounds: int = 3
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens is not None:
            flags.in_range(self.tokens, "--tokens", 4, 1 << 16)
        flags.in_range(self.rounds, "--rounds", 1, 1000)
        flags.in_range(self.seed, "--seed", 0, 1 << 20)
        flags.choice(self.dtype, "--dtype", DTYPES)

    def tokens_of(self, batch: int) -> int:
        """Tokens per request: fewer at large batches, whose steps take long."""
        if self.tokens is not None:
            return self.tokens
        return next((tokens for least, tokens in _TOKENS.items() if batch <= least), _FEWEST_TOKENS)

    def cells(self) -> list[Cell]:
        kinds: tuple[float | None, ...] = self.accuracies or (None,)
        return [Cell(batch=batch, accuracy=accuracy) for batch in self.batches for accuracy in kinds]

    def fixed(self) -> list[Budget]:
        return [Budget(name="fixed", max_draft_tokens=draft) for draft in self.drafts]

    def spec_rollout(self) -> dict[str, Any]:
        """Our engine's configuration: chains, as long as the longest asked for."""
        longest = max(self.drafts)
        drafters = ["oracle"] if self.accuracies else list(DRAFTERS)
        return {"drafters": drafters, "shape": "chain", "max_draft_tokens": longest, "max_depth": longest}

    def engine_arguments(self, model: Path) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`, the same for stock and ours."""
        largest = max(self.batches)
        return {
            "model": str(model),
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "max_num_seqs": largest,
            "max_model_len": self.max_model_len(),
            "max_num_batched_tokens": max(2048, largest * (PROMPT_LEN + MAX_NODES)),
        }

    def max_model_len(self) -> int:
        return PROMPT_LEN + max(map(self.tokens_of, self.batches)) + 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": {str(batch): self.tokens_of(batch) for batch in self.batches}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One batch at one quality of drafts."""

    batch: int
    # None: real drafters
    accuracy: float | None

    @property
    def title(self) -> str:
        return f"batch {self.batch}" + ("" if self.accuracy is None else f", accuracy {self.accuracy:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow(Row):
    """A row of one cell; `speedup` is the ratio to stock."""

    accuracy: float | None
    # of the first request's noise
    seed: int
    # False: outputs differ, so no speed is told and the cell decides nothing
    is_comparable: bool
    # the best fixed draft length's makespan / this one's, median over rounds; on the row of `auto` only
    auto_to_best: float | None
    # the draft length that was best; on the row of `auto` only
    best_draft: int | None


def params(plan: Plan, batch: int, seed: int, *, is_ours: bool) -> list[dict[str, Any]]:
    """`SamplingParams` of each request of a cell."""
    values: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": seed + i, "max_tokens": plan.tokens_of(batch), "ignore_eos": True}
        for i in range(batch)
    ]
    if is_ours:
        for i, one in enumerate(values):
            one["extra_args"] = {"spec_rollout": {"problem_id": str(i)}}
    return values


def cell_rows(cell: Cell, seed: int, pairs: Mapping[Budget, Sequence[Pair]]) -> list[SweepRow]:
    """The rows of a cell, `auto` first."""
    rows = {arm: make_row(arm.name, cell.batch, arm.max_draft_tokens or 0, own) for arm, own in pairs.items()}
    is_comparable = all(row.identical for row in rows.values())
    best = best_fixed(pairs) if is_comparable else None
    found = []
    for arm, row in rows.items():
        values = {field.name: getattr(row, field.name) for field in fields(row)}
        if not is_comparable:
            values |= {"speedup": None, "makespan_s": None, "stock_makespan_s": None, "rounds_s": None}
        is_auto = arm == AUTO and best is not None
        found.append(
            SweepRow(
                **values,
                accuracy=cell.accuracy,
                seed=seed,
                is_comparable=is_comparable,
                auto_to_best=ratio(pairs[best], pairs[AUTO]) if is_auto and best is not None else None,
                best_draft=best.max_draft_tokens if is_auto and best is not None else None,
            )
        )
    return found


def best_fixed(pairs: Mapping[Budget, Sequence[Pair]]) -> Budget | None:
    """The fixed draft length of the largest speed-up; None if none was run in every round."""
    rounds = _num_timed(pairs[AUTO])
    fixed = [arm for arm, own in pairs.items() if arm != AUTO and _num_timed(own) == rounds]
    return max(fixed, key=lambda arm: _speedup(pairs[arm]), default=None)


def ratio(ours: Sequence[Pair], than: Sequence[Pair]) -> float:
    """How many times as long the first takes as the second, median over rounds."""
    timed = [[pair.ours.wall_s for pair in pairs if pair.is_timed] for pairs in (ours, than)]
    return statistics.median(one / other for one, other in zip(*timed, strict=True))


def is_hopeless(speedups: Sequence[float]) -> bool:
    """Whether still longer drafts need not be tried, by those tried so far, in ascending order of length."""
    return len(speedups) > 1 and speedups[-1] < HOPELESS * max(speedups[:-1])


def _speedup(pairs: Sequence[Pair]) -> float:
    return statistics.median(pair.stock.wall_s / pair.ours.wall_s for pair in pairs if pair.is_timed)


def _num_timed(pairs: Sequence[Pair]) -> int:
    return sum(pair.is_timed for pair in pairs)


def summary(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """The worst cell of both criteria, and how many cells could not be compared."""
    autos = [row for row in rows if row.name == AUTO.name]
    found: dict[str, Any] = {
        "limit": LIMIT,
        "num_cells": len(autos),
        "num_not_comparable": sum(not row.is_comparable for row in autos),
    }
    for key, field in (("to_stock", "speedup"), ("to_best_fixed", "auto_to_best")):
        told = [row for row in autos if getattr(row, field) is not None]
        worst = min(told, key=lambda row: getattr(row, field), default=None)
        found[key] = worst and {
            "worst": getattr(worst, field),
            "batch": worst.batch,
            "accuracy": worst.accuracy,
            "num_below": sum(getattr(row, field) < LIMIT for row in told),
            "is_met": getattr(worst, field) >= LIMIT,
        }
    return found
