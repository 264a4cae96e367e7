"""What a step costs in milliseconds, learned while the engine runs.

What belongs here: from what a step did to how long it takes, with how sure that is. Not what to do about it.

    step_ms = fixed + request * requests + rows(rows) + draft * [any nodes] + tree * trees + branch * branches
              + context * context tokens / 1024

`rows` is a broken line that never falls, bent in a few places: nearly flat while a step is bound by memory, steeper
once it is bound by arithmetic (FastGRPO, section 4.1 and appendix B, measures the same curve and calls its knee
C_peak). The terms are fitted by least squares over recent decode steps, in relative error, with a pull towards
proportions typical of such engines and towards neighbouring pieces of the line, so that what no recent step informs
follows what is known. Steps far off the line count little (Huber's weights); when a dozen in a row are off the same way
the engine itself has changed, and the line is scaled and learned anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import StepTiming

Array = npt.NDArray[np.float64]

KNOTS = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048], dtype=np.float64)
"""Rows at which the line may bend; the last piece has no end. Dense where kernels' tiles make few rows jump."""
_PIECES = len(KNOTS)
_WIDTHS, _NOTHING = np.diff(KNOTS), np.zeros(1)
_FIXED, _ROWS = 0, slice(1, 1 + _PIECES)
_REQUEST, _DRAFT, _TREE, _BRANCH, _CONTEXT = range(1 + _PIECES, 6 + _PIECES)
_NUM = 6 + _PIECES

# 2-core CPU, 150 M parameters, bf16: fixed, a row, a request, any drafts, a tree, a branch, 1024 tokens of context
_TYPICAL = (1.0, 0.027, 0.003, 0.02, 0.003, 0.015, 0.002)
# how far an engine may be from that, as a standard deviation in the same unit
_SPREAD = (0.5, 0.05, 0.01, 0.3, 0.01, 0.02, 0.01)

PRIOR: Array = np.concatenate([_TYPICAL[:1], [_TYPICAL[1]] * _PIECES, _TYPICAL[2:]])
"""Terms before anything is seen, as shares of `fixed`."""
_PRIOR_SPREAD: Array = np.concatenate([_SPREAD[:1], [_SPREAD[1]] * _PIECES, _SPREAD[2:]])
_BEND = 0.02  # by how much two neighbouring pieces are expected to differ

_NOISE = 0.05  # relative error of one step, at the least
_MEMORY = 0.995  # weight left to a step after each further one: about the last two hundred count
_FIRST_FITS = 16  # steps after each of which the line is fitted; later every `_REFIT_EVERY` steps
_REFIT_EVERY = 8
_HUBER = 2.0  # relative errors beyond so many times the usual one count less
_WATCHED = 12  # steps in a row that are off the same way before the engine is taken for changed
_SHIFT = 0.12  # and by how much, in natural logarithm
_LEAP = 0.35  # an engine that is off by so much is believed in half the steps
_KEPT_AFTER_SHIFT = 0.2  # weight of what was learned before
_ERRORS = 64  # steps over which the error is reported


def features(rows: int, batch: int, nodes: int, trees: int, branches: int, context: int) -> Array:
    """[_NUM] what multiplies the terms."""
    x = np.empty(_NUM)
    x[_FIXED] = 1.0
    pieces = x[_ROWS]
    np.subtract(float(rows), KNOTS, out=pieces)
    np.maximum(pieces, 0.0, out=pieces)
    np.minimum(pieces[:-1], _WIDTHS, out=pieces[:-1])
    x[_REQUEST:] = (batch, float(nodes > 0), trees, branches, context / 1024.0)
    return x


class StepCost:
    """The fitted line. No term is ever negative, so no step gets cheaper by doing more."""

    def __init__(self, memory: float = _MEMORY) -> None:
        """memory: weight left to a step after each further one."""
        self._memory = memory
        self._prior = PRIOR.copy()
        self._terms = PRIOR.copy()
        self._moments = np.zeros((_NUM, _NUM))
        self._products = np.zeros(_NUM)
        self._noise = _NOISE
        self._seen = 0
        self._scale = 1.0
        self._shifts: deque[float] = deque(maxlen=_WATCHED)
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._inverse: Array | None = None
        self._set(self._terms)

    def _set(self, terms: Array) -> None:
        self._terms = terms
        # all but those of the rows, as numbers: they are asked for in every step
        self._others = (float(terms[_FIXED]), *map(float, terms[_REQUEST:]))
        self._line = _NOTHING

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def is_fitted(self) -> bool:
        """False until some steps have been seen: until then only the proportions of the terms mean anything."""
        return self._seen >= 4

    @property
    def is_settled(self) -> bool:
        """Whether the line is no longer fitted after every step."""
        return self._seen > _FIRST_FITS

    @property
    def fixed(self) -> float:
        """Milliseconds of a step whatever it does."""
        return float(self._terms[_FIXED])

    @property
    def request(self) -> float:
        """Milliseconds of one more request, besides its row."""
        return float(self._terms[_REQUEST])

    @property
    def draft(self) -> float:
        """Milliseconds that a step takes longer because it has drafts at all."""
        return float(self._terms[_DRAFT])

    @property
    def tree(self) -> float:
        """Milliseconds of one more request with drafts, besides its rows."""
        return float(self._terms[_TREE])

    @property
    def branch(self) -> float:
        """Milliseconds of one more root-to-leaf path."""
        return float(self._terms[_BRANCH])

    @property
    def context(self) -> float:
        """Milliseconds of 1,024 tokens of context."""
        return float(self._terms[_CONTEXT])

    def row_at(self, rows: int) -> float:
        """Milliseconds of one more row in a step of so many."""
        return float(self._terms[_ROWS][int(np.searchsorted(KNOTS, rows, side="right")) - 1])

    def added_rows(self, rows: int, more: int) -> Array:
        """[more + 1] milliseconds that 0, 1, 2, ... `more` rows add to a step of `rows`."""
        line = self._line_to(rows + more)[rows : rows + more + 1]
        return line - line[0]

    def _line_to(self, rows: int) -> Array:
        """[more than `rows`] milliseconds of 0, 1, 2, ... rows; kept until the line is another."""
        if rows >= len(self._line):
            at = np.arange(2 * rows + 64, dtype=np.float64)
            starts = np.concatenate([_NOTHING, np.cumsum(self._terms[_ROWS][:-1] * _WIDTHS)])
            piece = np.searchsorted(KNOTS, at, side="right") - 1
            self._line = starts[piece] + self._terms[_ROWS][piece] * (at - KNOTS[piece])
        return self._line

    def predict(
        self,
        rows: int,
        nodes: int = 0,
        branches: int = 0,
        *,
        batch: int | None = None,
        trees: int | None = None,
        context: int = 0,
    ) -> float:
        """Milliseconds of a decode step.

        Args:
            rows: of the forward pass, draft nodes included.
            nodes, branches, context: as in `StepTiming`.
            batch: requests; by default, the rows that are not nodes.
            trees: requests with drafts; by default, all if there are nodes.
        """
        batch = rows - nodes if batch is None else batch
        trees = (batch if nodes else 0) if trees is None else trees
        fixed, request, draft, tree, branch, tokens = self._others
        drafts = (draft if nodes else 0.0) + tree * trees + branch * branches
        return fixed + request * batch + float(self._line_to(rows)[rows]) + drafts + tokens * context / 1024.0

    def spread(self, rows: int, nodes: int = 0, branches: int = 0, *, batch: int | None = None) -> float:
        """Standard deviation, in milliseconds, of what `predict` says of a step: its noise and our ignorance of it."""
        batch = rows - nodes if batch is None else batch
        x = features(rows, batch, nodes, batch if nodes else 0, branches, 0)
        predicted = float(x @ self._terms)
        if self._inverse is None:
            return predicted
        ignorance = float(x @ self._inverse @ x) * (self._scale / max(predicted, 1e-9)) ** 2
        return predicted * self._noise * float(np.sqrt(1.0 + max(ignorance, 0.0)))

    @property
    def error(self) -> float:
        """Median of |predicted - measured| / measured over the last steps, each predicted before it was learned."""
        return float(np.median(self._errors)) if self._errors else 0.0

    # --- learning ----------------------------------------------------------------------------------------------------

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from steps measured earlier on such an engine: they become the prior, and count little themselves."""
        for timing in timings:
            self.observe(timing)
        if not self._seen:
            return
        self._fit()
        self._prior = self._terms / max(float(self._terms[_FIXED]), 1e-9)
        self._keep(_KEPT_AFTER_SHIFT)
        self._errors.clear()

    def observe(self, timing: StepTiming) -> None:
        """Learn from a step; steps with prompt tokens in them follow another line and are left out."""
        if not timing.is_decode_only or timing.step_ms <= 0.0:
            return
        trees = timing.trees or min(timing.nodes, timing.batch)
        x = features(timing.rows, timing.batch, timing.nodes, trees, timing.branches, timing.context)
        weight = self._judge(x, timing.step_ms)
        self._moments *= self._memory
        self._moments += np.outer(weight * x, x)
        self._products *= self._memory
        self._products += (weight * timing.step_ms) * x
        self._seen += 1
        if self._seen <= _FIRST_FITS or self._seen % _REFIT_EVERY == 0:
            self._fit()

    def _judge(self, x: Array, step_ms: float) -> float:
        """The weight of a step among the others; also watches for an engine that has changed."""
        if not self._seen:
            return 1.0 / step_ms**2
        predicted = max(float(x @ self._terms), 1e-6)
        self._errors.append(abs(predicted - step_ms) / step_ms)
        if self._seen < 4:
            return 1.0 / step_ms**2
        self._shifts.append(math.log(step_ms / predicted))
        shift = self._shift()
        if shift:
            self._rescale(math.exp(shift))
            predicted *= math.exp(shift)
        off = abs(step_ms - predicted) / predicted
        usual = _HUBER * self._noise
        # what all recent steps are off by is not noise: it is on its way to be taken for a change
        apart = abs(math.log(step_ms / predicted) - (median(self._shifts) if self._shifts else 0.0))
        self._noise = max(_NOISE, math.sqrt(0.98 * self._noise**2 + 0.02 * min(apart, 2.0 * usual) ** 2))
        return min(1.0, usual / max(off, 1e-9)) / predicted**2

    def _shift(self) -> float:
        """Natural logarithm of how much slower the engine has become; 0.0 if it has not."""
        for steps, least in ((_WATCHED // 2, _LEAP), (_WATCHED, max(_SHIFT, 2.0 * self._noise))):
            recent = list(self._shifts)[-steps:]
            if len(recent) == steps and min(map(abs, recent)) > 0.5 * least and abs(median(recent)) > least:
                return float(median(recent))
        return 0.0

    def _rescale(self, factor: float) -> None:
        """Everything has become `factor` times as slow."""
        self._set(self._terms * factor)
        # in relative error a step's weight is 1 / ms^2, and its product holds one more ms
        self._moments /= factor**2
        self._products /= factor
        self._keep(_KEPT_AFTER_SHIFT)
        self._shifts.clear()

    def _keep(self, share: float) -> None:
        self._moments *= share
        self._products *= share

    def _fit(self) -> None:
        prior = self._prior
        # The prior's scale is what makes it agree best with the steps seen.
        explained = float(prior @ self._moments @ prior)
        self._scale = scale = max(float(prior @ self._products) / max(explained, 1e-30), 1e-9)
        known = self._moments * (scale**2 / self._noise**2) + _PULL
        wanted = self._products * (scale / self._noise**2) + _PULL @ prior
        terms = np.linalg.solve(known, wanted)
        floor = 0.02 * prior
        low = terms < floor
        if low.any():
            # hold those at their floor and fit the others once more
            held = np.where(low, floor, 0.0)
            free = ~low
            terms = held
            terms[free] = np.linalg.solve(known[np.ix_(free, free)], (wanted - known @ held)[free])
            np.maximum(terms, floor, out=terms)
        if self._seen % 64 == 0:
            self._inverse = np.asarray(np.linalg.inv(known) / self._noise**2)
        self._set(np.asarray(terms * scale))


def _pull() -> Array:
    """[_NUM, _NUM] precision of the prior: how far each term, and each bend of the line, is from what is expected."""
    precision = np.diag(1.0 / _PRIOR_SPREAD**2)
    # the pieces hold on to each other, and only loosely to the typical slope
    pieces = precision[_ROWS, _ROWS]
    pieces *= 0.1
    for piece in range(_PIECES - 1):
        pieces[piece : piece + 2, piece : piece + 2] += np.asarray([[1.0, -1.0], [-1.0, 1.0]]) / _BEND**2
    return precision


_PULL: Array = _pull()
