"""RhymeRL: Table 2, how well last epoch's lengths rank this epoch's answers (section 6.2)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import quantiles

import numpy as np
from vllm_specrollout.bench.studies.formulas import Floats
from vllm_specrollout.bench.studies.report import Cell, Inputs, Number, ResultTable, StudyReport, error_of

TABLE_2 = {
    ("first", 8): (85.7, 12.2, 0.61, 1.49),
    ("first", 16): (79.7, 16.8, 1.03, 2.47),
    ("second", 8): (83.2, 12.7, 0.55, 3.55),
    ("second", 16): (76.9, 17.5, 1.02, 4.58),
    ("third", 8): (79.0, 16.9, 0.86, 3.24),
    ("third", 16): (71.6, 22.8, 1.47, 4.13),
}
"""Data set and ranks -> percentages, as `ROWS` has them, which add up to 100. Of other data sets one row is printed."""
ROWS = ("accurate", "not in the last 10 %", "within beta", "migrated")
LAST, LEAST_GROWTH = 0.1, 1.1
"""alpha, and the least beta."""


class RhymeRLInputs(Inputs):
    """Math-14B on 128 GPUs, answers of up to 16K tokens."""

    # text
    longest: Number = 16384
    samples: Number = 16
    problems: Number = 8192
    # free, fitted: own spread over the problems' by data set, to the accuracy with 8 ranks
    own_spread: tuple[Number, Number, Number] = (0.159, 0.192, 0.258)
    # free, fitted to section 3: the first worker to end idles for 76 % of a step, all of them for 46 % in the mean
    median_length: Number = 1600
    length_spread: Number = 0.95


def ranks(forecasts: Mapping[str, float], count: int) -> list[list[str]]:
    """Problems in so many groups of like forecasts, the shortest first; they differ by one problem in size at most."""
    ordered = sorted(forecasts, key=forecasts.__getitem__)
    bounds = [len(ordered) * i // count for i in range(count + 1)]
    return [ordered[low:high] for low, high in pairwise(bounds)]


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """beta: the 75th percentile of how problems' lengths grew from one epoch to the next; 1.1 at least."""
    rates = [after[problem] / before[problem] for problem in after if before.get(problem)]
    return max(quantiles(rates, n=4)[2] if len(rates) > 1 else LEAST_GROWTH, LEAST_GROWTH)


def epochs(inputs: RhymeRLInputs, own_spread: float, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    """[P, samples] lengths in two epochs that follow each other; problems share a part, own_spread says how much."""
    whole = float(np.hypot(1.0, own_spread))
    of_problem = rng.standard_normal((count, 1))

    def one() -> Floats:
        size = (of_problem + own_spread * rng.standard_normal((count, int(inputs.samples)))) / whole
        return np.clip(inputs.median_length * np.exp(inputs.length_spread * size), 1.0, inputs.longest)

    return one(), one()


def medians(lengths: Floats) -> dict[str, float]:
    """Problem (its number) -> what HistoPipe forecasts by, in its next epoch."""
    return {str(i): length for i, length in enumerate(np.median(lengths, axis=1).tolist())}


def ranked(inputs: RhymeRLInputs, own_spread: float, count: int, seed: int) -> tuple[float, float, float, float]:
    """A column of Table 2, in percent."""
    before, now = epochs(inputs, own_spread, np.random.default_rng(seed), int(inputs.problems))
    past = medians(before)
    groups = ranks(past, count)
    # answers that are as long as those of a rank by their real order
    bounds = np.quantile(now, np.arange(1, count) / count)
    beta = growth(past, medians(now))
    shares = np.zeros(4)
    for number, group in enumerate(groups):
        own = np.sort(now[[int(problem) for problem in group]].ravel())
        wrong = np.searchsorted(bounds, own, side="right") > number
        last = np.arange(len(own)) >= (1.0 - LAST) * len(own)
        beyond = own > beta * past[group[-1]]
        shares += [(~wrong).sum(), (wrong & ~last).sum(), (wrong & last & ~beyond).sum(), (wrong & last & beyond).sum()]
    first, second, third, fourth = (100.0 * shares / now.size).tolist()
    return first, second, third, fourth


def run(inputs: RhymeRLInputs, seed: int) -> StudyReport:
    """RhymeRL, Table 2: ranks by last epoch's lengths. The paper prints no lengths."""
    figures: dict[str, float] = {}
    spreads = dict(zip(("first", "second", "third"), inputs.own_spread, strict=True))
    table: list[tuple[Cell, ...]] = []
    for (dataset, count), printed in TABLE_2.items():
        cells = []
        for name, ours, theirs in zip(ROWS, ranked(inputs, spreads[dataset], count, seed), printed, strict=True):
            figures[f"{dataset} {count} {name}"] = ours / theirs
            fitted = "*" if count == 8 and name == ROWS[0] else ""
            cells.append(f"{ours:.2f} / {theirs:.2f} {error_of(ours, theirs)}{fitted}")
        table.append((dataset, str(count), *cells))
    return StudyReport(
        title="RhymeRL: Math-14B, 128 GPUs, answers of up to 16K tokens",
        tables=(ResultTable("Table 2, percent of answers, ours / paper", ("data set", "ranks", *ROWS), tuple(table)),),
        figures=figures,
        findings=(
            "Fitted: accuracy with 8 ranks (*), and the lengths to two idle shares of a step of plain rollout.",
            "Wrong answers are the longest of their rank. With a tenth of each rank as the last ones, the printed"
            " columns would need nearly all wrong ones in two of eight ranks: the paper must mean another tenth.",
        ),
    )
