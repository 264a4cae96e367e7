"""The rows of a report: from paired runs to ratios. Pure.

A row whose outputs differ keeps its counts and loses every time: there is no speed of a wrong answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .ideal import StepTimes, ideal_speedup
from .runs import Run, first_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs of the same requests, one right after the other."""

    stock: Run
    ours: Run
    # a warm-up run counts for identity, not for time
    is_timed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a report; docs/reference/bench.md says what each field means. None: not measured, or not told."""

    name: str
    batch: int
    draft: int
    num_requests: int
    output_tokens: int
    identical: bool
    difference: str | None
    steps: int
    stock_steps: int
    tokens_per_step: float | None
    nodes_per_step: float | None
    verified_per_accepted: float | None
    # what follows is told only if outputs are identical
    speedup: float | None = None
    # lower and upper, over rounds
    speedup_quartiles: tuple[float, float] | None = None
    ideal: float | None = None
    efficiency: float | None = None
    decode_speedup: float | None = None
    makespan_s: float | None = None
    stock_makespan_s: float | None = None
    tokens_per_s: float | None = None
    stock_tokens_per_s: float | None = None
    overhead_ms_per_step: float | None = None
    draft_ms_per_step: float | None = None
    # tokens per request -> milliseconds of a stock step at this batch
    stock_step_ms: dict[str, float] | None = None
    # per timed round: [stock seconds, our seconds]
    rounds_s: list[list[float]] | None = None


SPEEDS = tuple(one.name for one in fields(Row) if one.default is None)
"""Fields of a row that are told only if outputs are identical."""


R = TypeVar("R", bound=Row)


def make_row(name: str, batch: int, draft: int, pairs: Sequence[Pair], times: StepTimes | None = None) -> Row:
    """Sum up all pairs of one configuration.

    Args:
        times: stock's step times at this batch; None leaves `ideal` and `efficiency` out.
    """
    timed = [pair for pair in pairs if pair.is_timed]
    last, difference = timed[-1], _difference(pairs)
    counts = _counts(last.ours)
    return Row(
        name=name,
        batch=batch,
        draft=draft,
        num_requests=len(last.stock.token_ids),
        output_tokens=last.stock.num_tokens,
        identical=difference is None,
        difference=difference,
        steps=len(last.ours.step_s),
        stock_steps=len(last.stock.step_s),
        **counts,
        **(_speeds(timed, counts, times) if difference is None else {}),
    )


def grown(cls: type[R], row: Row, **more: Any) -> R:
    """The row with a scenario's own fields, or others in the place of its."""
    return cls(**{name: getattr(row, name) for name in Row.__dataclass_fields__} | more)


@dataclass(frozen=True, slots=True)
class Judged:
    """Where outputs part from stock's, in words: proven ties, and what is none."""

    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def ratio(ours: Sequence[Pair], than: Sequence[Pair]) -> float:
    """How many times as long the first takes as the second, median over rounds."""
    timed = [[pair.ours.wall_s for pair in pairs if pair.is_timed] for pairs in (ours, than)]
    return statistics.median(one / other for one, other in zip(*timed, strict=True))


def speedup(pairs: Sequence[Pair]) -> float:
    """Stock's makespan by ours, median over rounds."""
    return statistics.median(pair.stock.wall_s / pair.ours.wall_s for pair in pairs if pair.is_timed)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper; of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _difference(pairs: Sequence[Pair]) -> str | None:
    """Stock against itself first: what it does not repeat, nobody can be compared with."""
    itself = [pair.stock.itself for pair in pairs if pair.stock.itself is not None]
    found = itself or [d for pair in pairs if (d := first_difference(pair.stock, pair.ours)) is not None]
    if not found:
        return None
    more = f"; in {len(found)} runs" if len(found) > 1 else ""
    return ("stock against itself: " if itself else "") + found[0].as_text("then" if itself else "ours") + more


def _speeds(timed: Sequence[Pair], counts: dict[str, Any], times: StepTimes | None) -> dict[str, Any]:
    """The fields of SPEEDS."""
    last, ideal = timed[-1], None
    if times is not None and counts["tokens_per_step"] is not None:
        ideal = ideal_speedup(counts["tokens_per_step"], counts["nodes_per_step"] or 0.0, times)
    faster = speedup(timed)
    ours_s = statistics.median(pair.ours.wall_s for pair in timed)
    stock_s = statistics.median(pair.stock.wall_s for pair in timed)
    has_decoded = all(pair.ours.decode_s > 0 and pair.stock.decode_s > 0 for pair in timed)
    decode = [pair.stock.decode_s / pair.ours.decode_s for pair in timed] if has_decoded else []
    known = [(pair.ours, totals) for pair in timed if (totals := pair.ours.totals) is not None]
    # what a step of ours costs beyond the forward pass, and the drafting part of it
    overhead = [(run.wall_s * 1e3 - totals.forward_ms) / totals.steps for run, totals in known]
    draft = [totals.draft_ms / totals.steps for _, totals in known]
    return {
        "speedup": faster,
        "speedup_quartiles": quartiles([pair.stock.wall_s / pair.ours.wall_s for pair in timed]),
        "ideal": ideal,
        "efficiency": None if ideal is None else faster / ideal,
        "decode_speedup": statistics.median(decode) if decode else None,
        "makespan_s": ours_s,
        "stock_makespan_s": stock_s,
        "tokens_per_s": last.ours.num_tokens / ours_s,
        "stock_tokens_per_s": last.stock.num_tokens / stock_s,
        "overhead_ms_per_step": statistics.median(overhead) if overhead else None,
        "draft_ms_per_step": statistics.median(draft) if draft else None,
        "stock_step_ms": None if times is None else {str(n): ms for n, ms in sorted(times.items())},
        "rounds_s": [[pair.stock.wall_s, pair.ours.wall_s] for pair in timed],
    }


def _counts(run: Run) -> dict[str, Any]:
    """Per request and step. The step that computes the prompt is left out: it has no draft and yields one token."""
    totals = run.totals
    if totals is None:
        return {"tokens_per_step": 1.0, "nodes_per_step": 0.0, "verified_per_accepted": None}
    # None rather than a division by zero
    decode_steps = max(0, totals.request_steps - len(run.token_ids)) or None
    return {
        # what a request was given, not what the worker sampled: tokens after a stop are dropped
        "tokens_per_step": decode_steps and (run.num_tokens - len(run.token_ids)) / decode_steps,
        "nodes_per_step": decode_steps and totals.drafted / decode_steps,
        "verified_per_accepted": decode_steps and (totals.drafted / totals.accepted if totals.accepted else None),
    }
