"""What the hardware would allow: the ideal speed-up of drafts, from stock vLLM's own step times. Pure.

With tau tokens per verify step, and t(n) the time of a stock step that computes n tokens for each of its requests,
drafts of N nodes can at best be tau * t(1) / t(1 + N) times as fast: stock pays t(1) per token, a verify step pays for
1 + N rows. Drafting, laying out, sampling rows, walking and committing are counted as free.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

StepTimes = Mapping[int, float]
"""Tokens per request -> milliseconds of a stock step, at one batch size."""


def step_times(decode_ms: Sequence[float], extend_ms: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """t(n) from plain decode steps, and from steps that appended n tokens to cached prefixes.

    A measured extension also pays for admitting its requests, which decode steps do not. That part is the same for
    every n, so the difference from n = 1 is what counts: t(n) = decode + extend(n) - extend(1), and never less than
    for a smaller n.
    """
    decode = statistics.median(decode_ms)
    base = statistics.median(extend_ms[1])
    times: dict[int, float] = {}
    longest = decode
    for n in sorted(extend_ms):
        longest = max(longest, decode + statistics.median(extend_ms[n]) - base)
        times[n] = longest
    return times


def at(times: StepTimes, n: float) -> float:
    """t(n) between measured points: linear. Outside of them: the nearest."""
    known = sorted(times)
    if n <= known[0]:
        return times[known[0]]
    for low, high in zip(known, known[1:], strict=False):
        if n <= high:
            return times[low] + (times[high] - times[low]) * (n - low) / (high - low)
    return times[known[-1]]


def ideal_speedup(tokens_per_step: float, nodes: float, times: StepTimes) -> float:
    """tau * t(1) / t(1 + nodes); both per request and verify step."""
    return tokens_per_step * at(times, 1) / at(times, 1 + nodes)
