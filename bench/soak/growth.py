"""Whether something grows: a series of samples, judged after it has settled. Pure.

Medians of the first and of the last quarter are compared: one large request body moves neither. The least-squares slope
is told beside them; it is no verdict, as one step early in the series bends it as much as a leak.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SAMPLES = 8
"""Of a shorter series nothing is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """From the first to the last quarter of a series."""

    # medians; None: too few samples to tell
    first: float | None
    last: float | None
    # of the least-squares line, per hour
    slope: float | None

    @property
    def share(self) -> float | None:
        """Growth as a share of the first quarter's median."""
        return None if self.first is None or self.last is None else self.last / max(self.first, 1e-9) - 1.0

    @property
    def difference(self) -> float | None:
        return None if self.first is None or self.last is None else self.last - self.first


def growth(times_s: Sequence[float], values: Sequence[float], settled_s: float) -> Growth:
    """Of the samples taken from `settled_s` on.

    Args:
        times_s, values: equally long; times in seconds, ascending.
    """
    kept = [(time, value) for time, value in zip(times_s, values, strict=True) if time >= settled_s]
    if len(kept) < LEAST_SAMPLES:
        return Growth(first=None, last=None, slope=None)
    quarter = len(kept) // 4
    slope = statistics.linear_regression(*zip(*kept, strict=True)).slope
    return Growth(
        first=statistics.median(value for _, value in kept[:quarter]),
        last=statistics.median(value for _, value in kept[-quarter:]),
        slope=slope * 3600.0,
    )
