"""HistoPipe: problems placed by length for a trainer with two steps in flight, and outliers that move on. Pure.

Each engine gets problems of like lengths, short ones in odd steps and long ones in even steps, or the other way round.
A group does not run this: its engines would need a version of the weights each (ADR 36).

Source: RhymeRL, section 6: ranks (6.2), outliers that migrate (6.3), workers of each rank (6.4, Fig. 12).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle, pairwise
from statistics import quantiles

LAST, LEAST_GROWTH = 0.1, 1.1
"""alpha, and the least beta."""


def ranks(forecasts: Mapping[str, float], count: int) -> list[list[str]]:
    """Problems in so many groups of like forecasts, the shortest first; they differ by one problem in size at most."""
    ordered = sorted(forecasts, key=forecasts.__getitem__)
    return [ordered[low:high] for low, high in _parts(len(ordered), count)]


def _parts(total: int, count: int) -> list[tuple[int, int]]:
    return list(pairwise(total * i // count for i in range(count + 1)))


def pipeline(
    groups: Sequence[Sequence[str]], engines: Sequence[str], step: int, workers: Sequence[int] | None = None
) -> dict[str, str]:
    """HistoPipe: problem -> its engine in a step. Odd steps go up the ranks, and even ones down.

    So an engine's long step follows a short one, and none waits for the longest answer of each step: for a trainer with
    two steps in flight. For one synchronous step it is the worst order there is, and a group's `deal` is for that.

    Args:
        groups: the ranks, shortest first, at most as many as engines.
        workers: engines of each rank (`workers_of_ranks`). None: as many for each. A rank's problems go round them.
    """
    names = list(engines) if step % 2 else list(reversed(engines))
    sizes = workers or [high - low for low, high in _parts(len(names), len(groups))]
    ends = accumulate(sizes)
    out: dict[str, str] = {}
    for group, size, end in zip(groups, sizes, ends, strict=True):
        out |= dict(zip(group, cycle(names[end - size : end]), strict=False))
    return out


def workers_of_ranks(
    lengths: Sequence[float],
    workers: int,
    tau: Callable[[float, int], float],
    *,
    train_s: float = 0.0,
    precision_s: float = 0.01,
) -> list[int] | None:
    """Two-tier scheduling, Fig. 12: workers of each rank, with which times rise evenly from rank to rank.

    A rank's and its opposite's time make 2 t0 + (N - 1) d for all engines then, and the least of that is wanted. The
    paper searches d alone, with t0 by the most workers that the user allows a rank. Here each t0 is tried.

    Args:
        lengths: representative one of each rank, shortest first.
        workers: of all ranks together.
        tau: (representative length, workers) -> seconds of a rank, by measured steps; more workers are no slower.
        train_s: of the trainer's step, which no rank need undercut.

    Returns:
        None: there are fewer workers than ranks.
    """
    most, last = workers - len(lengths) + 1, len(lengths) - 1
    found: list[tuple[float, list[int]]] = []
    for first in range(1, most + 1):
        first_s = max(tau(lengths[0], first), train_s)
        steepest = max((tau(length, 1) - first_s) / max(i, 1) for i, length in enumerate(lengths))
        low, high = 0.0, max(steepest, 0.0) + precision_s
        plan = _sloped(lengths, workers, tau, first_s, high)
        while plan is not None and high - low > precision_s:
            middle = (low + high) / 2.0
            better = _sloped(lengths, workers, tau, first_s, middle)
            low, high, plan = (middle, high, plan) if better is None else (low, middle, better)
        if plan is not None:
            found.append((2.0 * first_s + last * high, plan))
    if not found:
        return None
    plan = min(found)[1]
    for _ in range(workers - sum(plan)):
        # those that no slope needs, of which the paper says nothing, go where it takes longest; a first rank that is
        # faster would make the line steeper
        plan[max(range(min(1, last), len(plan)), key=lambda i: (tau(lengths[i], plan[i]), i))] += 1
    return plan


def _sloped(
    lengths: Sequence[float], workers: int, tau: Callable[[float, int], float], first_s: float, slope: float
) -> list[int] | None:
    """The fewest workers of each rank that keep to the line; None: there are not so many."""
    plan: list[int] = []
    for i, length in enumerate(lengths):
        room = workers - sum(plan) - (len(lengths) - 1 - i)
        at = bisect_left(range(1, room + 1), True, key=lambda k: tau(length, k) <= first_s + i * slope)
        if at >= room:
            return None
        plan.append(at + 1)
    return plan


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """beta: the 75th percentile of how problems' lengths grew from one epoch to the next; 1.1 at least."""
    rates = [after[problem] / before[problem] for problem in after if before.get(problem)]
    return max(quantiles(rates, n=4)[2] if len(rates) > 1 else LEAST_GROWTH, LEAST_GROWTH)


def outliers(
    running: Mapping[str, int], dealt: int, longest: float, beta: float, pays: Callable[[Sequence[str]], bool]
) -> list[str]:
    """Requests of an engine that are to go on elsewhere: the last tenth of a rank, far longer than it was expected.

    Args:
        running: request -> tokens of its answer.
        dealt: requests that the engine began the step with.
        longest: forecast of its problems: the paper's historical lengths are medians, too.
        pays: whether moving these gains more than computing their contexts again costs.
    """
    if len(running) > LAST * dealt:
        return []
    chosen = [request for request, tokens in running.items() if tokens > beta * longest]
    return chosen if chosen and pays(chosen) else []
