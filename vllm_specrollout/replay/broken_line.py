"""Fits a step's milliseconds with a line that bends in the rows of the forward pass, to all recorded steps at once.

What belongs here: the line that never falls and its fit. Which terms a step has besides rows is cost.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import StepTiming

Floats = npt.NDArray[np.float64]

KNOTS: Floats = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048], dtype=np.float64)
"""Rows at which the line may bend; the last piece has no end. Dense where kernels' tiles make few rows jump."""
NUM_OTHERS = 6
"""Terms before the pieces: fixed, request, any drafts, tree, branch, token of context."""

# where the recording says nothing: shares of `fixed` for each of those terms, and for a row; and how far a recording
# may be from that, in the same unit. 2-core CPU, 150 M parameters, bf16.
_OTHERS = (1.0, 0.003, 0.02, 0.003, 0.015, 2e-6)
_OTHERS_SPREAD = (0.5, 0.01, 0.3, 0.01, 0.02, 1e-5)
_ROW, _ROW_SPREAD = 0.027, 0.16
_BEND = 0.02  # by how much two neighbouring pieces are expected to differ
_NOISE = 0.05  # relative error of a step, at the least
_ROUNDS = 8


def along(slopes: Sequence[float], rows: int) -> float:
    """Milliseconds of so many rows: the broken line with these slopes, from 0 rows on."""
    return float(np.dot(slopes, _pieces(rows)))


def fit(timings: Sequence[StepTiming]) -> Floats:
    """[NUM_OTHERS + len(KNOTS)] the terms, none negative; the pieces' slopes come last.

    Least squares in relative error, with a pull to typical proportions and towards neighbouring pieces, and little
    weight for disturbed steps.
    """
    measured = np.asarray([timing.step_ms for timing in timings])
    x = np.asarray([_features(timing) for timing in timings]) / measured[:, None]
    prior, pull = _prior()
    scale = 1.0 / max(float(np.median(x @ prior)), 1e-30)
    weights, noise = np.ones(len(x)), _NOISE
    for _ in range(_ROUNDS):
        scaled = x * weights[:, None] * (scale / noise**2)
        terms = scale * non_negative(scale * scaled.T @ x + pull, scaled.sum(axis=0) + pull @ prior)
        off = np.abs(x @ terms - 1.0)
        weights = np.minimum(1.0, 2.0 * noise / np.maximum(off, 1e-12))
        noise = max(_NOISE, float(np.sqrt(np.mean(np.minimum(off, 4.0 * noise) ** 2))))
    return terms


def non_negative(moments: Floats, products: Floats) -> Floats:
    """Minimise t'Mt/2 - p't over t >= 0: drop the most negative term and solve again, until none is."""
    active = list(range(len(products)))
    terms = np.zeros(len(products))
    while active:
        solved = np.linalg.solve(moments[np.ix_(active, active)], products[active])
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0:
            terms[active] = solved
            break
        active.pop(worst)
    return terms


def _pieces(rows: int) -> Floats:
    """[len(KNOTS)] how many of the rows lie on each piece."""
    past = np.maximum(rows - KNOTS, 0.0)
    past[:-1] = np.minimum(past[:-1], np.diff(KNOTS))
    return past


def _features(timing: StepTiming) -> Floats:
    trees = timing.trees or min(timing.nodes, timing.batch)
    others = [1.0, timing.batch, float(timing.nodes > 0), trees, timing.branches, timing.context]
    return np.concatenate([others, _pieces(timing.batch + timing.nodes)])


def _prior() -> tuple[Floats, Floats]:
    """What the terms are pulled to, and the precision of that."""
    count = len(KNOTS)
    spread = np.asarray([*_OTHERS_SPREAD, *[_ROW_SPREAD] * count])
    pull = np.diag(1.0 / spread**2)
    for piece in range(NUM_OTHERS, NUM_OTHERS + count - 1):
        pull[piece : piece + 2, piece : piece + 2] += np.asarray([[1.0, -1.0], [-1.0, 1.0]]) / _BEND**2
    return np.asarray([*_OTHERS, *[_ROW] * count]), pull
