"""What drafting and verifying take: straight lines over the batch, given or fitted to profiled rows.

Source: SpecActor, section 4.1, D(b) and V(b). What belongs here: the line, its fit and the fit's error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_specrollout.budgets.step_cost import Floats, non_negative
from vllm_specrollout.errors import ConfigError

_RIDGE = 1e-12
"""Of the squared size of a term: it only keeps equations solvable, where rows say nothing of the term."""


class Time(Protocol):
    """What a drafter's or a verifier's step takes, whatever its shape."""

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Milliseconds of a step with so many requests and so many drafts each."""
        ...


@dataclass(frozen=True, slots=True)
class AffineTime:
    """fixed + batch * (per request + drafts of each * per row), in milliseconds.

    Of a drafter it is D(b), the time in which each of b requests gets one more drafted token. Of a verifier it is
    V(b, w): a step of b requests, each with its own row and some drafts' rows. The paper fits V anew for each w; here w
    is in the line.

    Raises:
        ConfigError: a term is negative or not finite.
    """

    per_request_ms: float
    fixed_ms: float
    # of a draft's row beside the request's own
    per_row_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_request_ms", "fixed_ms", "per_row_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"`{name}` is {value}, not a time", "give milliseconds, 0 or more")

    def ms(self, batch: float, drafts: float = 0.0) -> float:
        """Milliseconds of a step with so many requests and so many drafts each."""
        return self.fixed_ms + batch * (self.per_request_ms + drafts * self.per_row_ms)

    def shared_by(self, workers: int) -> AffineTime:
        """The line of so many workers, each with its share of the batch."""
        return replace(self, per_request_ms=self.per_request_ms / workers, per_row_ms=self.per_row_ms / workers)


@dataclass(frozen=True, slots=True)
class TimeFit:
    """A line, and how far the profiled rows lie from it, as shares of what was measured."""

    time: AffineTime
    # root of the mean square
    error: float
    worst_error: float


def fit_time(batch: npt.ArrayLike, ms: npt.ArrayLike, drafts: npt.ArrayLike | None = None) -> TimeFit:
    """The line with the least squared relative error, and no term below 0.

    Args:
        batch: [N] requests of each profiled step.
        ms: [N] what it took.
        drafts: [N] drafts of each request; none by default, and then `per_row_ms` is 0.

    Raises:
        ConfigError: the rows cannot be used, or do not tell the terms apart.
    """
    sizes, times = np.asarray(batch, dtype=np.float64), np.asarray(ms, dtype=np.float64)
    rows = np.zeros_like(sizes) if drafts is None else np.asarray(drafts, dtype=np.float64)
    if not (sizes.ndim == 1 and sizes.shape == times.shape == rows.shape):
        raise ConfigError("a profile's columns have different lengths", "give a batch and a time in every row")
    if not all(np.isfinite(column).all() for column in (sizes, times, rows)):
        raise ConfigError("a profile holds a value that is not finite", "measure that row again")
    if (sizes < 1.0).any() or (times <= 0.0).any() or (rows < 0.0).any():
        raise ConfigError(
            "a profile holds a batch below 1, a time that is not above 0, or drafts below 0", "leave that row out"
        )
    terms = [np.ones_like(sizes), sizes] + ([sizes * rows] if rows.any() else [])
    x = np.stack(terms, axis=1)
    if np.linalg.matrix_rank(x) < x.shape[1]:
        raise ConfigError(
            f"a profile of {len(sizes)} rows does not tell the {x.shape[1]} terms of a line apart",
            "profile at least two batches" + (", and two numbers of drafts at one of them" if rows.any() else ""),
        )
    return _fitted(x, times)


def _fitted(x: Floats, times: Floats) -> TimeFit:
    """Args: [N, terms] features: 1, batch and, if any are drafted, batch * drafts; [N] milliseconds."""
    shares = x / times[:, None]
    scale = np.linalg.norm(shares, axis=0)  # the terms' units are far apart
    unit = shares / scale
    moments = unit.T @ unit + _RIDGE * np.eye(x.shape[1])
    found = non_negative(moments, unit.T @ np.ones(len(times))) / scale
    off = shares @ found - 1.0
    fixed, per_request, *per_row = found.tolist()
    time = AffineTime(per_request, fixed, *per_row)
    return TimeFit(time, float(np.sqrt(np.mean(off**2))), float(np.abs(off).max()))
