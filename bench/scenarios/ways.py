"""A way to draft, as `bench decoupled` found it in one setting: times plain decoding, beside its estimate. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..runner.rows import Pair, quartiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to draft in one setting."""

    # times plain decoding, and the quartiles over rounds; None where an output is not stock's
    speedup: float | None
    quartiles: tuple[float, float] | None
    # None: the planner does not know this way
    estimated: float | None
    tokens_per_step: float

    @property
    def error(self) -> float | None:
        """Of the estimate, as a share of what was measured."""
        return None if self.speedup is None or self.estimated is None else self.estimated / self.speedup - 1.0


def measured(pairs: Sequence[Pair], estimated: float | None, is_told: bool) -> Way:
    speeds = [pair.stock.wall_s / pair.ours.wall_s for pair in pairs]
    last = pairs[-1].ours
    return Way(
        speedup=statistics.median(speeds) if is_told else None,
        quartiles=quartiles(speeds) if is_told else None,
        estimated=estimated,
        tokens_per_step=1.0 if last.totals is None else last.num_tokens / last.totals.request_steps,
    )


def shown(way: Way) -> str:
    if way.speedup is None:
        return "-"
    estimate = "" if way.estimated is None else f" ({way.estimated:.2f}x, {way.error:+.0%})"
    return f"{way.speedup:.2f}x{estimate}"
