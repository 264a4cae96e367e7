"""Cost of a decode step in milliseconds, and of asking for drafts: the one model of both.

What belongs here: the two ways to learn a step's terms. A budget learns while it runs, and forgets (`StepCost`); a
replay knows the whole run, and does not (`CostLine`, `fit_line`). Both are least squares with terms of at least 0,
pulled to what is believed where steps say nothing, and both give a disturbed step little weight.

`StepCost` keeps a table of step times by the rows of the forward pass (requests and draft nodes). The table has a value
at each of `KNOTS` rows, is straight between them and never falls:

    step_ms = table(rows) + draft * [any nodes] + branch * branches

Where steps say nothing the table goes on straight, from flat when nothing is known at all. Rows far beyond all tried
cost infinitely much, so that what is believed of them is tested before it is relied on.

`CostLine` has what a recorded run tells besides: terms per request, tree and token of context, those of asking and of
prompts, and a line that bends in the rows (`ROW_KNOTS`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import StepTiming

Floats = npt.NDArray[np.float64]

KNOTS: Floats = np.unique(np.rint(2.0 ** np.arange(0.0, 14.5, 0.5)))
"""Rows at which the table has a value: two per octave. docs/adr/0016-goodput.md has what each constant here earns."""
PRICE_MEMORY = 0.9
"""Weight left to what was known of a price, after each further time; before that, the mean of all times."""
CHEAP = 0.02
"""Share of a step's time below which asking is worth it whatever it yields."""
OCTAVES = 32
"""Of how many requests something is done for; more than any engine runs."""
MOST_OVERRUN = 1024
"""Steps, at most, after which a drafter that has taken too long is asked again."""
GROWTH = 4
"""A step may have so many times the rows of the widest one seen, or of its own requests."""
MEMORY = 0.995
"""Weight left to a step after each further one."""
OFF, RUN = 0.12, 6
"""An engine that is off by more than this (natural logarithm), in so many steps in a row, has changed its speed."""
_REFIT = 8  # steps after which the table is fitted again once it is asked; after every step at first
_MOST_WEIGHT = 1e6  # of one step beside those before it, in sums that do not fade
_NOISE = 0.05  # relative error of one step
# How far the table may bend at a knot, rise between two knots, and what drafts may cost beside their rows: standard
# deviations, as shares of a step. They are wide: they decide only what no step has shown.
_BEND, _RISE, _DRAFT, _BRANCH = 0.3, 100.0, 0.5, 0.02
_LEAST = 1e-3  # of the usual step: no step takes no time

_KNOTS: list[float] = KNOTS.tolist()  # a lookup in a list costs a tenth
_NUM = len(KNOTS)
_AT_DRAFT, _AT_BRANCH, _SIZE = _NUM, _NUM + 1, _NUM + 2
_FLAT: Floats = np.concatenate([np.ones(_NUM), np.zeros(2)])


class StepCost:
    """The table, and how it is learned."""

    def __init__(self) -> None:
        # sums over steps, times `_weight`, which grows instead of all sums fading: of one step few terms are not 0
        self._moments = np.zeros((_SIZE, _SIZE))
        self._products = np.zeros(_SIZE)
        self._weight = 1.0
        self._terms = _FLAT
        # [rows + 1] milliseconds of 0, 1, 2, ... rows; made longer when asked for more
        self._line = np.ones(1)
        self.is_known = False
        """False before the first step: milliseconds mean nothing until then."""
        self._widest = 0
        self._seen = 0
        # at how many steps seen the table is fitted again, if anybody asks what steps cost by then
        self._fit_at = 0
        # of the last steps in a row that were off the same way: logarithm of what they took over what was predicted
        self._off: list[float] = []
        # what was learned before the first of them
        self._before = (self._moments, self._products)

    @property
    def branch_ms(self) -> float:
        """A root-to-leaf path beyond a request's first."""
        return float(self._terms[_AT_BRANCH])

    def plain_ms(self, num_requests: int) -> float:
        """A step without drafts. Context is not told apart: it grows slowly, and the table follows."""
        self._fit_if_due()
        return float(self._rows(num_requests)[num_requests])

    def added_ms(self, num_requests: int, num_nodes: int) -> Floats:
        """[num_nodes + 1] float64: what 0, 1, 2, ... draft nodes add to a step of so many requests; never falls."""
        self._fit_if_due()
        last = num_requests + num_nodes
        line = self._rows(last)[num_requests : last + 1]
        added = line - line[0] + float(self._terms[_AT_DRAFT])
        added[0] = 0.0
        added[GROWTH * max(self._widest, num_requests) - num_requests + 1 :] = np.inf
        return added

    def predict(self, num_requests: int, num_nodes: int, branches: int = 0) -> float:
        """A step with so many draft nodes, without what asking for them takes."""
        rows = num_requests + num_nodes
        drafts = float(self._terms[_AT_DRAFT]) + self.branch_ms * branches if num_nodes else 0.0
        return float(self._rows(rows)[rows]) + drafts

    def observe(self, timing: StepTiming) -> None:
        """Learn from a step; one with prompt tokens in it follows another line and is left out."""
        ms = timing.step_ms - timing.ask_ms
        if not timing.is_decode_only or not 0.0 < ms < math.inf:
            return
        rows = timing.batch + timing.nodes
        if rows <= self._widest:
            self._watch(math.log(ms / self.predict(timing.batch, timing.nodes, timing.branches)))
        else:
            # what is off where nothing was known says nothing of the engine's speed
            self._widest = rows
            self._off.clear()
        self._weight /= MEMORY
        if self._weight > _MOST_WEIGHT:
            self._fade()
        terms = [(i, x / ms) for i, x in _features(timing) if x]
        for i, x in terms:
            self._products[i] += self._weight * x
            for j, y in terms:
                self._moments[i, j] += self._weight * x * y
        self._seen, self.is_known = self._seen + 1, True
        if self._seen <= 2 * _REFIT:
            self._fit()

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from steps measured earlier on such an engine; they fade as its own do."""
        for timing in timings:
            self.observe(timing)
        self._fit()

    def _rows(self, rows: int) -> Floats:
        if rows >= len(self._line):
            at = np.arange(2 * rows + 1, dtype=np.float64)
            self._line = np.interp(at, KNOTS, self._terms[:_NUM])
        return self._line

    def _watch(self, off: float) -> None:
        """Tell an engine that has changed its speed from steps that were disturbed."""
        if abs(off) <= OFF or (self._off and (off > 0.0) != (self._off[0] > 0.0)):
            self._off.clear()
        if abs(off) <= OFF:
            return
        if not self._off:
            self._fade()
            self._before = (self._moments.copy(), self._products.copy())
        self._off.append(off)
        if len(self._off) == RUN:
            (self._moments, self._products), self._weight = self._before, 1.0
            factor = math.exp(median(self._off))
            # a step's features are divided by its milliseconds: twice in the moments, once in the products
            self._moments /= factor**2
            self._products /= factor
            self._off.clear()
            self._fit()

    def _fit_if_due(self) -> None:
        """A fit takes as long as a tenth of a small model's step, so there is none while nobody asks, as in a pause."""
        if self._seen >= self._fit_at and not self._off:
            self._fit()

    def _fade(self) -> None:
        """The sums as they are, with the newest step weighing 1."""
        self._moments /= self._weight
        self._products /= self._weight
        self._weight = 1.0

    def _fit(self) -> None:
        self._fit_at = self._seen + _REFIT
        self._fade()
        level = float(_FLAT @ self._moments @ _FLAT)
        if level <= 0.0:
            return
        scale = float(_FLAT @ self._products) / level
        moments = self._moments * (scale / _NOISE) ** 2 + _PULL
        products = self._products * (scale / _NOISE**2) + _PULL @ _FLAT
        terms = non_negative(moments, products, _NUM)  # nothing gets cheaper by drafts
        # Whatever disturbs a step makes it slower: where more rows took less time, the fewer rows' time was wrong.
        table, known = np.maximum(terms[:_NUM], _LEAST), int(np.searchsorted(KNOTS, self._widest)) + 1
        table[:known] = np.minimum.accumulate(table[:known][::-1])[::-1]
        terms[:_NUM] = np.maximum.accumulate(table)
        self._terms = terms * scale
        self._line = self._line[:0]


class Price:
    """Milliseconds that something takes, by the octave of how many requests it is done for.

    A model's pass takes most of its time whatever the number of requests, so neither its time per request nor its time
    alone holds for another batch.
    """

    def __init__(self) -> None:
        # [OCTAVES] milliseconds, how often each was seen, and which octave stands for each: the nearest one known
        self._ms, self._times, self._nearest = [0.0] * OCTAVES, [0] * OCTAVES, [0] * OCTAVES

    def spent(self, num_requests: int, ms: float) -> None:
        """So many requests took so long. An octave's first time may hold what is done once: it counts only where no
        other is known, and until the second."""
        octave = min(num_requests.bit_length(), OCTAVES - 1)
        known, times = self._ms[octave], self._times[octave]
        if times > 1:
            ms = min(ms, 2.0 * known)  # a single time that holds more than asking does not spoil the price
        weight = max(1.0 / max(times, 1), 1.0 - PRICE_MEMORY)
        self._ms[octave], self._times[octave] = known + weight * (ms - known), times + 1
        if times < 2:
            found = [own for own in range(OCTAVES) if self._times[own] > 1]
            found = found or [own for own in range(OCTAVES) if self._times[own]]
            self._nearest = [min(found, key=lambda own: (abs(own - of), own)) for of in range(OCTAVES)]

    def of(self, num_requests: int) -> float:
        """What it takes for so many requests; where that is not known, as for the nearest number that is. 0.0: nothing
        is known, or nothing is to be done."""
        octave = num_requests.bit_length()
        return self._ms[self._nearest[min(octave, OCTAVES - 1)]] if octave else 0.0

    def is_expensive(self, num_requests: int, step_ms: float) -> bool:
        """Whether it must be worth what it takes; not where a step's time is not known (0.0)."""
        return self.of(num_requests) > CHEAP * step_ms > 0.0

    def up_to(self, num_requests: int) -> Floats:
        """[num_requests + 1] what it takes for 0, 1, 2, ... requests."""
        octaves = np.asarray(self._ms)[self._nearest]
        octaves[0] = 0.0
        return octaves[np.minimum(np.frexp(np.arange(num_requests + 1))[1], OCTAVES - 1)]


TIME_SHARE = 1.0
"""Most time that an engine gives each drafter, as a share of what the rest of a step takes."""


class Asking:
    """What asking each drafter takes, and who has had more than his share of the time.

    A drafter may take `share` of what the rest of a step takes. What it takes beyond that it owes: it is asked again
    after so many steps that it has had its share and no more, on average.

    Args:
        share: infinite: there is no limit.
    """

    def __init__(self, share: float = math.inf) -> None:
        self.share = share
        self.prices: defaultdict[str, Price] = defaultdict(Price)
        self.ms = 0.0
        """Of those asked in the step at hand, together: the caller sets it to 0.0 when a step begins."""
        self.overruns: dict[str, float] = {}
        """Drafter -> milliseconds that it owes; it is not asked as long as it owes any."""
        # decode steps without what drafts took in them
        self._rest = Price()
        self._last_batch = 0

    def limit_ms(self, num_requests: int) -> float:
        """What a drafter may take in a step of so many requests; 0.0: no step's time is known yet."""
        return math.inf if math.isinf(self.share) else self.share * self._rest.of(num_requests)

    def spent(self, name: str, num_requests: int, ms: float, limit_ms: float = math.inf) -> None:
        """Asking the drafter for so many requests took so many milliseconds, of which it may take `limit_ms`."""
        self.prices[name].spent(num_requests, ms)
        self.ms += self.prices[name].of(num_requests)
        if 0.0 < limit_ms < ms:
            # the step that it was asked in pays its share as well
            self.overruns[name] = min(ms, MOST_OVERRUN * limit_ms)

    def passed(self, timing: StepTiming | None) -> None:
        """A step is over, which pays for itself; None: its time is not known."""
        if timing is not None:
            self._last_batch = timing.batch
            if timing.is_decode_only and 0.0 < (ms := timing.step_ms - timing.ask_ms) < math.inf:
                self._rest.spent(timing.batch, ms)
        if self.overruns:
            paid = self.limit_ms(self._last_batch)
            self.overruns = {name: owed - paid for name, owed in self.overruns.items() if owed > paid}


def _features(timing: StepTiming) -> list[tuple[int, float]]:
    """Terms, and what multiplies each; the others' is 0."""
    rows = min(float(timing.batch + timing.nodes), _KNOTS[-1])
    left = min(bisect_right(_KNOTS, rows) - 1, _NUM - 2)
    share = (rows - _KNOTS[left]) / (_KNOTS[left + 1] - _KNOTS[left])
    drafts = [(_AT_DRAFT, float(timing.nodes > 0)), (_AT_BRANCH, float(timing.branches))]
    return [(left, 1.0 - share), (left + 1, share), *drafts]


def _pull() -> Floats:
    """[_SIZE, _SIZE] precision of what is believed before any step: the table is straight, flat and of any height."""
    slopes = np.diff(np.eye(_SIZE)[:_NUM], axis=0) / np.diff(KNOTS)[:, None]
    rises = slopes * KNOTS[:-1, None] / _RISE
    bends = np.diff(slopes, axis=0) * KNOTS[1:-1, None] / _BEND
    others = np.diag([1e-2] + [0.0] * (_NUM - 1) + [_DRAFT**-2, _BRANCH**-2])
    return np.asarray(rises.T @ rises + bends.T @ bends + others, dtype=np.float64)


_PULL: Floats = _pull()

# --- a whole run -----------------------------------------------------------------------------------------------------

ROW_KNOTS: Floats = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048], np.float64)
"""Rows at which a line may bend; the last piece has no end. Dense where kernels' tiles make few rows jump."""
MOST = 1 << 40
"""Largest count in a file, and longest time in milliseconds (35 years)."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Ms = Annotated[float, msgspec.Meta(ge=0.0, le=MOST)]
COLUMNS = tuple(field.name for field in fields(StepTiming))  # of a timing that is kept; others come behind them

# The terms that are fitted, before the slopes of the pieces; and what all are pulled to where the run says nothing of
# them: shares of `fixed`, and standard deviations of that. 2-core CPU, 150 M parameters, bf16.
_FITTED = ("fixed", "request", "draft", "tree", "branch", "context")
_PRIOR = np.asarray([1.0, 0.003, 0.02, 0.003, 0.015, 2e-6, *[0.027] * len(ROW_KNOTS)])
_SPREAD = np.asarray([0.5, 0.01, 0.3, 0.01, 0.02, 1e-5, *[0.16] * len(ROW_KNOTS)])
_PIECES_BEND = 0.02  # by how much two neighbouring pieces are expected to differ
_ROUNDS = 8


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """A `types.StepTiming` as profiles and traces keep it: its columns in a row."""

    batch: Count
    rows: Count
    nodes: Count
    branches: Count
    tokens: Count
    step_ms: Ms
    is_decode_only: bool
    trees: Count = 0
    context: Count = 0
    waiting: Count = 0
    ask_ms: Ms = 0.0

    @classmethod
    def of(cls, timing: StepTiming) -> Timing:
        values: dict[str, Any] = {name: getattr(timing, name) for name in COLUMNS}
        return cls(**values | {"step_ms": round(timing.step_ms, 6), "ask_ms": round(timing.ask_ms, 6)})

    def step(self) -> StepTiming:
        return StepTiming(*msgspec.structs.astuple(self))


class CostLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A step's terms, in milliseconds; none is negative.

    step_ms = fixed + request * requests + rows' line + context * tokens attended to
              + draft * [any nodes] + tree * trees + node * nodes + branch * branches
              + ask + ask_request * requests asked for        (if drafters were asked)
              + prompt + prompt_row * rows                    (if prompts were computed)
    """

    fixed: Ms = 0.0
    request: Ms = 0.0
    draft: Ms = 0.0
    tree: Ms = 0.0
    node: Ms = 0.0
    branch: Ms = 0.0
    context: Ms = 0.0
    ask: Ms = 0.0
    ask_request: Ms = 0.0
    prompt: Ms = 0.0
    prompt_row: Ms = 0.0
    # rows computed per token of a prompt: below 1 where samples share their prompts' blocks
    prompt_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    # per row, between each two of ROW_KNOTS and beyond the last; empty: rows are in `request` and `node`
    rows: tuple[Ms, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rows) not in (0, len(ROW_KNOTS)):
            raise ValueError(f"a line that bends at {len(self.rows)} places, not at {len(ROW_KNOTS)}")

    def step_ms(self, step: StepTiming, prompt_rows: int = 0, asked: int = 0) -> float:
        """Args:
        step: what it has to do; its own time is not looked at.
        prompt_rows: rows of prompts in it.
        asked: requests that drafters are asked for after it.
        """
        ms = self.fixed + self.request * step.batch + self.context * step.context
        if self.rows:
            ms += float(np.dot(self.rows, _pieces(step.batch + step.nodes)))
        if step.nodes:
            ms += self.draft + self.tree * _trees(step) + self.node * step.nodes + self.branch * step.branches
        if prompt_rows:
            ms += self.prompt + self.prompt_row * prompt_rows
        return ms + self.ask_ms(asked)

    def ask_ms(self, asked: int) -> float:
        """Of asking drafters for so many requests."""
        return self.ask + self.ask_request * asked if asked else 0.0


def _trees(step: StepTiming) -> int:
    return step.trees or min(step.nodes, step.batch)


def fit_line(steps: Sequence[StepTiming], ms: Floats) -> CostLine:
    """The line through all decode steps at once. It bends in the rows: a batch of one and a batch with two hundred
    nodes do not lie on one straight line.

    Args:
        ms: [steps] what each took without asking drafters.

    Raises:
        ArithmeticError, numpy.linalg.LinAlgError: no line fits them.
    """
    with np.errstate(over="raise", invalid="raise"):
        x = [[1, s.batch, s.nodes > 0, _trees(s), s.branches, s.context, *_pieces(s.batch + s.nodes)] for s in steps]
        found = _fit(np.asarray(x, float), ms, _PRIOR, _pull_of_line()).tolist()
        return CostLine(**dict(zip(_FITTED, found, strict=False)), rows=tuple(found[len(_FITTED) :]))


def fit_two(counts: Sequence[int], ms: Sequence[float]) -> tuple[float, float]:
    """A fixed part, and one for each of the counted."""
    x = np.asarray([[1.0, count] for count in counts])
    fixed, each = _fit(x, np.asarray(ms), np.asarray([1.0, 0.1]), np.diag([0.01, 0.01])).tolist()
    return fixed, each


def non_negative(moments: Floats, products: Floats, first: int = 0) -> Floats:
    """Minimise t'Mt/2 - p't with t >= 0 from term `first` on: hold the most negative one at 0 and solve the others
    again, until none is. Both arguments are overwritten."""
    while True:
        terms: Floats = np.asarray(np.linalg.solve(moments, products), dtype=np.float64)
        worst = first + int(np.argmin(terms[first:]))
        if terms[worst] >= 0.0:
            return terms
        moments[worst, :] = moments[:, worst] = 0.0
        moments[worst, worst], products[worst] = 1.0, 0.0


def _fit(x: Floats, y: Floats, prior: Floats, pull: Floats) -> Floats:
    """[T] least squares in relative error, with little weight for disturbed steps; 0 where nothing took any time.

    Args:
        x, y: [N, T], [N] what multiplies the terms, and their sum.
        prior, pull: [T], [T, T] what the terms are pulled to, as shares of their scale, and the precision of that.
    """
    if not (y > 0.0).any():
        return np.zeros(len(prior))
    x = x[y > 0.0] / y[y > 0.0, None]
    scale = float(np.median(1.0 / np.maximum(x @ prior, 1e-30)))
    weights, noise = np.ones(len(x)), _NOISE
    for _ in range(_ROUNDS):
        precision = pull * (noise / scale) ** 2
        weighed = (x * weights[:, None]).T
        terms = non_negative(weighed @ x + precision, weighed.sum(axis=1) + scale * (precision @ prior))
        off = np.abs(1.0 - x @ terms)
        weights = np.minimum(1.0, 2.0 * noise / np.maximum(off, 1e-12))
        noise = max(_NOISE, float(np.sqrt(np.mean(np.minimum(off, 4.0 * noise) ** 2))))
    return terms


def _pieces(rows: int) -> Floats:
    """[len(ROW_KNOTS)] how many of the rows lie on each piece."""
    past = np.maximum(rows - ROW_KNOTS, 0.0)
    past[:-1] = np.minimum(past[:-1], np.diff(ROW_KNOTS))
    return past


def _pull_of_line() -> Floats:
    """[T, T] precision of `_PRIOR`."""
    pull = np.diag(1.0 / _SPREAD**2)
    for piece in range(len(_FITTED), len(pull) - 1):
        pull[piece : piece + 2, piece : piece + 2] += np.asarray([[1.0, -1.0], [-1.0, 1.0]]) / _PIECES_BEND**2
    return pull
