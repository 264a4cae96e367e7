"""What the hardware would allow: the ideal speed-up of drafts, from stock vLLM's own step times. Pure.

With tau tokens per verify step, and t(n) the time of a stock step that computes n tokens for each of its requests,
drafts of N nodes can at best be tau * t(1) / t(1 + N) times as fast: stock pays t(1) per token, a verify step pays for
1 + N rows. Drafting, laying out, sampling rows, walking and committing are counted as free.

In a rollout the batch shrinks towards the end, so there is no single t(n): every step of ours is charged what stock
needs for a step of as many rows. Up to the batch size that is its own decode steps with that many requests running;
above it, steps that append several tokens per request.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from .runs import Run, WorkerTotals

StepTimes = Mapping[int, float]
"""Tokens per request (in a rollout: rows) -> milliseconds of a stock step, at one batch size."""
_FEWEST_STEPS = 3
"""Steps with n requests running that make a median worth having."""


def step_times(decode_ms: Sequence[float], extend_ms: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """t(n) from plain decode steps, and from steps that appended n tokens to cached prefixes.

    A measured extension also pays for admitting its requests, which decode steps do not. That part is the same for
    every n, so the difference from n = 1 is what counts: t(n) = decode + extend(n) - extend(1), and never less than
    for a smaller n.
    """
    return _rising(_extended(statistics.median(decode_ms), extend_ms))


def _extended(decode: float, extend_ms: Mapping[int, Sequence[float]]) -> dict[int, float]:
    base = statistics.median(extend_ms[1])
    return {n: decode + (statistics.median(ms) - base) for n, ms in extend_ms.items()}


def _rising(times: StepTimes) -> dict[int, float]:
    """In ascending order of n, and no time less than one before it."""
    known = sorted(times)
    return dict(zip(known, accumulate((times[n] for n in known), max), strict=True))


def at(times: StepTimes, n: float) -> float:
    """t(n) between measured points: linear. Outside of them: the nearest."""
    known = sorted(times)
    return float(np.interp(n, known, [times[one] for one in known]))


def ideal_speedup(tokens_per_step: float, nodes: float, times: StepTimes) -> float:
    """tau * t(1) / t(1 + nodes); both per request and verify step."""
    return tokens_per_step * at(times, 1) / at(times, 1 + nodes)


def running(run: Run, batch: int) -> list[int]:
    """Requests running in each step but the first; exact as long as no request is preempted.

    The scheduler admits first come, first served: as many run as have not ended, at most `batch`.
    """
    ends = sorted(run.finish_s)
    return [min(batch, len(ends) - bisect_right(ends, begin)) for begin in run.step_s[:-1]]


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
    wider = {batch * n: ms for n, ms in _extended(at(times, batch), extend_ms).items() if n > 1}
    return _rising(times | wider)


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
