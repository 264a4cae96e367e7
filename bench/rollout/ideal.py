"""The ideal speed-up of a rollout, in which the batch shrinks towards the end. Pure.

bench/common/ideal.py has one batch and one t(n). Here both runs change their batch as requests end, so every step of
ours is charged what stock needs for a step of as many rows: up to the batch size, its own decode steps with that many
requests running; above it, steps that append several tokens per request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ..common.ideal import StepTimes, at
from ..common.runs import Run, WorkerTotals

_FEWEST_STEPS = 3
"""Steps with n requests running that make a median worth having."""


def running(run: Run, batch: int) -> list[int]:
    """Requests running in each step but the first; exact as long as no request is preempted.

    The scheduler admits first come, first served: as many run as have not ended, at most `batch`.
    """
    ends = sorted(run.finish_s)
    left, counts, ended = len(ends), [], 0
    for begin in run.step_s[:-1]:
        while ended < len(ends) and ends[ended] <= begin:
            ended += 1
        counts.append(min(batch, left - ended))
    return counts


def row_times(runs: Sequence[Run], batch: int, extend_ms: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Rows of a step -> milliseconds that stock needs for it, never fewer for more rows.

    Args:
        runs: stock's.
        extend_ms: n -> milliseconds of steps that append n tokens to each of `batch` requests; from n = 1.
    """
    decode: dict[int, list[float]] = {}
    for run in runs:
        for count, ms in zip(running(run, batch), run.step_ms(), strict=True):
            decode.setdefault(count, []).append(ms)
    times = {count: statistics.median(ms) for count, ms in decode.items() if len(ms) >= _FEWEST_STEPS}
    if not times:
        return {}
    full = at(times, batch)
    base = statistics.median(extend_ms[1])
    times |= {batch * n: full + statistics.median(ms) - base for n, ms in extend_ms.items() if n > 1}
    longest = 0.0
    for rows in sorted(times):
        longest = times[rows] = max(longest, times[rows])
    return times


def ideal_rollout_speedup(stock: Run, totals: WorkerTotals, batch: int, times: StepTimes) -> float | None:
    """All of stock's steps over all of ours, both at stock's price for their rows; None if too little is known.

    Computing prompts is left out on both sides. Our worker records the rows of steps that only decode; those of ours
    that also compute a prompt are charged the others' mean.
    """
    recorded = sum(count for count, _ in totals.by_rows.values())
    if not recorded or not times:
        return None
    counts = running(stock, batch)
    stock_ms = sum(at(times, count) for count in [*counts[:1], *counts])
    decode_ms = sum(count * at(times, rows) for rows, (count, _) in totals.by_rows.items())
    return stock_ms / (decode_ms * totals.steps / recorded)


def extend_sizes(batch: int, totals: WorkerTotals) -> list[int]:
    """Which n to measure: 1, and powers of two until batch * n covers the widest step."""
    widest = max(totals.by_rows, default=batch)
    largest = max(1, math.ceil(widest / batch))
    return [1 << i for i in range((largest - 1).bit_length() + 1)]
