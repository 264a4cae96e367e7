"""Load patterns: who arrives when, and how long answers are. Pure.

Arrivals depend on how many requests have finished, never on the clock, so that every preset meets the same load.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PATTERNS = ("drain", "fill", "bursts", "bad-drafter", "new-weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One load."""

    name: str
    # per request
    lengths: tuple[int, ...]
    # per request, ascending: it arrives once so many have finished
    arrives_after: tuple[int, ...]
    # output position of each request after which the drafter is bad; None: never
    turns_bad_at: int | None = None
    # the weights are loaded anew once so many have finished; None: never
    reload_after: int | None = None


def pattern(name: str, requests: int, tokens: int) -> Pattern:
    """The pattern of this name for about so many requests, the longest of about so many tokens."""
    short, few, more = max(4, tokens // 4), max(requests // 8, 3), {}
    if name == "drain":
        # a long tail: most are short, a few close to `tokens`
        lengths = [max(4, round(tokens * ((i + 1) / requests) ** 3)) for i in range(requests)]
        arrives = [0] * requests
    elif name == "fill":
        # 1, then 4, 16, ... more: each wave comes when the first answer of the last one ends, while the others go on
        lengths, arrives, finished = [short], [0], 0
        while len(lengths) < requests:
            finished += 1
            size = min(4**finished, requests - len(lengths))
            lengths += [short, *(tokens,) * (size - 1)]
            arrives += [finished] * size
    elif name == "bursts":
        # three, of short answers, beside one long one; each comes when the last one is over
        size = max((requests - 1) // 3, 1)
        lengths = [tokens, *(short,) * 3 * size]
        arrives = [0, *(burst * size for burst in range(3) for _ in range(size))]
    elif name == "bad-drafter":
        lengths, arrives, more = [tokens] * few, [0] * few, {"turns_bad_at": tokens // 2}
    else:
        # one short answer, at whose end the weights change
        lengths, arrives, more = [tokens // 2, *(tokens,) * (few - 1)], [0] * few, {"reload_after": 1}
    return Pattern(name=name, lengths=tuple(lengths), arrives_after=tuple(arrives), **more)


def tail(sizes: Sequence[int], seed: int, num_short: int, num_long: int) -> list[int]:
    """Indices of problems for a long tail: the shortest and the longest ones by `sizes`, mixed."""
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    chosen = [*order[:num_short], *order[len(order) - num_long :]]
    random.Random(seed).shuffle(chosen)
    return chosen


def tail_ratio(lengths: Sequence[int]) -> float:
    """The 75th percentile of the lengths by the longest; below 0.2 is a long tail."""
    ordered = sorted(lengths)
    return ordered[(len(ordered) - 1) * 3 // 4] / ordered[-1]
