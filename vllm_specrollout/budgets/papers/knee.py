"""Knee of step times, where they start to grow with rows: FastGRPO's C_peak. Pure: (rows, milliseconds) points in.

Source: FastGRPO, Appendix B, Algorithm 2, which plots time against batch and takes the knee without saying how.

Method. Repeated points of one row count become their median. A line a + s * rows is fitted by least squares in relative
error, each row count weighing by the root of its points; then, for every corner between the second and the last but one
row count, two lines that meet there, none of them falling. The best corner is the knee if
- the second line is at least twice as steep as the first, and
- it takes off the squared error 16 times what one point leaves: what it leaves itself, per degree of freedom, or noise
  (3 %, or what points of the same row count scatter by), whichever is larger. A corner has two parameters, and the best
  of many is looked at: noise alone seldom gives it half of that.

Without such a corner the curve is a line, as where memory traffic and arithmetic do not overlap. The paper's words are
that "the latency begins to grow obviously". So the knee of a line is where it lies a tenth (`growth`) above the time of
one row, and no lower than the largest row count whose own time is that close to the shortest. If the time grows by less
than that over all that was measured, the knee lies beyond it, and none is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.budgets.step_cost import Floats, non_negative

_STEEPER = 2.0
_EVIDENCE = 16.0
_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Knee:
    """Where time starts to grow."""

    # C_peak, in rows of the forward pass
    rows: float
    # milliseconds there
    ms: float
    # False: the points are a line, and this is where it has grown by `growth`
    is_corner: bool


def find_knee(rows: Sequence[float], ms: Sequence[float], growth: float = 0.1) -> Knee | None:
    """The knee of a time curve.

    Args:
        rows: [P] rows of a step, at least 1.
        ms: [P] its milliseconds.
        growth: share of a step's time by which it must have grown to have done so obviously.

    Returns:
        None where less than a doubling of the rows was measured, or time does not grow obviously over them.
    """
    x, y, count, scatter = _medians(np.asarray(rows, dtype=np.float64), np.asarray(ms, dtype=np.float64))
    if len(x) < 2 or x[-1] < 2.0 * x[0]:
        return None
    weight = np.sqrt(count) / y**2
    (intercept, slope), line_error = _fitted(np.stack([np.ones_like(x), x], axis=1), y, weight, 0)
    if slope * (x[-1] - x[0]) < growth * (intercept + slope * x[0]):
        return None
    best = _best_corner(x, y, weight)
    if best is not None:
        at, first, second, at_ms, error = best
        noise = float(np.mean(np.sqrt(count) * np.maximum(_NOISE, scatter / y) ** 2))
        left = max(error / max(len(x) - 4, 1), noise)
        if second >= _STEEPER * first and second > 0.0 and line_error - error > _EVIDENCE * left:
            return Knee(at, at_ms, True)
    level = x[y <= (1.0 + growth) * y.min()]
    at = max(1.0 + growth * (intercept + slope) / slope, float(level[-1]))
    return Knee(at, intercept + slope * at, False)


def _medians(rows: Floats, ms: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Per row count, ascending: the rows, the median time, how many points, and the standard error of the median."""
    counts, index = np.unique(rows, return_inverse=True)
    groups = [ms[index == i] for i in range(len(counts))]
    middle = np.asarray([np.median(group) for group in groups])
    # 1.48 times the median deviation is a normal distribution's standard deviation
    scatter = np.asarray([1.48 * np.median(np.abs(g - np.median(g))) / np.sqrt(len(g)) for g in groups])
    return counts, middle, np.asarray([float(len(group)) for group in groups]), scatter


def _fitted(columns: Floats, y: Floats, weight: Floats, first: int) -> tuple[list[float], float]:
    """(terms, those from `first` on not below 0, the weighted squared error)."""
    weighed = (columns * weight[:, None]).T
    terms = non_negative(weighed @ columns, weighed @ y, first)
    return terms.tolist(), float(weight @ (y - columns @ terms) ** 2)


def _best_corner(x: Floats, y: Floats, weight: Floats) -> tuple[float, float, float, float, float] | None:
    """(rows, slope before, slope after, ms, squared error) of the best two lines that meet; None with too few points.

    Corners are tried at every row count but the outermost, and where those are few, at three places between each two.
    """
    if len(x) < 4:
        return None
    edges = zip(x[1:-2], x[2:-1], strict=True) if len(x) > 4 else [(x[1], x[2])]
    places = 5 if len(x) <= 16 else 2
    found = []
    for corner in np.unique(np.concatenate([np.linspace(a, b, places) for a, b in edges])).tolist():
        # time does not fall with rows: the best line before the corner may be level
        columns = np.stack([np.ones_like(x), np.maximum(x - corner, 0.0), np.minimum(x - corner, 0.0)], axis=1)
        (ms, after, before), error = _fitted(columns, y, weight, 2)
        found.append((corner, before, after, ms, error))
    return min(found, key=lambda one: one[4])
