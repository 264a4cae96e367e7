"""What a decode step costs in milliseconds, and what asking for drafts does, learned while the engine runs.

What belongs here: a table of step times by the rows of the forward pass (requests and draft nodes), what drafts
cost beside their rows, and the price of asking. The table has a value at each of `KNOTS` rows, is straight between them
and never falls. All values come from one least-squares fit to the steps seen, in relative error, so that a disturbed
step counts little:

    step_ms = table(rows) + draft * [any nodes] + branch * branches

Where steps say nothing the table goes on straight, from flat when nothing is known at all. Rows far beyond all tried
cost infinitely much, so that what is believed of them is tested before it is relied on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import StepTiming

Floats = npt.NDArray[np.float64]

KNOTS: Floats = np.unique(np.rint(2.0 ** np.arange(0.0, 14.5, 0.5)))
"""Rows at which the table has a value: two per octave. docs/adr/0016-goodput.md has what each constant here earns."""
PRICE_MEMORY = 0.9
"""Weight left to what was known of a price, after each further time; before that, the mean of all times."""
CHEAP = 0.02
"""What takes less than this share of a step's time is done whatever it yields."""
MOST_OWED = 1024
"""Steps, at most, after which a drafter that has taken too long is asked again."""
GROWTH = 4
"""A step may have so many times the rows of the widest one seen, or of its own requests."""
MEMORY = 0.995
"""Weight left to a step after each further one."""
OFF, RUN = 0.12, 6
"""An engine that is off by more than this (natural logarithm), in so many steps in a row, has changed its speed."""
_REFIT = 8  # steps after which the table is fitted again; after every step at first
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
        self._moments = np.zeros((_SIZE, _SIZE))
        self._products = np.zeros(_SIZE)
        self._terms = _FLAT
        # [rows + 1] milliseconds of 0, 1, 2, ... rows; made longer when asked for more
        self._line = np.ones(1)
        self._widest = 0
        self._seen = 0
        # of the last steps in a row that were off the same way: logarithm of what they took over what was predicted
        self._off: list[float] = []
        # what was learned before the first of them
        self._before = (self._moments, self._products)

    @property
    def is_known(self) -> bool:
        """False before the first step: milliseconds mean nothing until then."""
        return self._seen > 0

    @property
    def branch_ms(self) -> float:
        """A root-to-leaf path beyond a request's first."""
        return float(self._terms[_AT_BRANCH])

    def plain_ms(self, num_requests: int, context: int = 0) -> float:
        """A step without drafts. Context is not told apart: it grows slowly, and the table follows."""
        return float(self._rows(num_requests)[num_requests])

    def added_ms(self, num_requests: int, num_nodes: int) -> Floats:
        """[num_nodes + 1] float64: what 0, 1, 2, ... draft nodes add to a step of so many requests; never falls."""
        last = num_requests + num_nodes
        line = self._rows(last)[num_requests : last + 1]
        added = line - line[0] + float(self._terms[_AT_DRAFT])
        added[0] = 0.0
        added[GROWTH * max(self._widest, num_requests) - num_requests + 1 :] = np.inf
        return added

    def predict(self, num_requests: int, num_nodes: int, branches: int = 0, context: int = 0) -> float:
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
        x = _features(timing) / ms
        self._moments *= MEMORY
        self._moments += x[:, None] * x
        self._products *= MEMORY
        self._products += x
        self._seen += 1
        if self._seen <= 2 * _REFIT or (self._seen % _REFIT == 0 and not self._off):
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
            self._before = (self._moments.copy(), self._products.copy())
        self._off.append(off)
        if len(self._off) == RUN:
            self._moments, self._products = self._before
            factor = math.exp(median(self._off))
            # a step's features are divided by its milliseconds: twice in the moments, once in the products
            self._moments /= factor**2
            self._products /= factor
            self._off.clear()
            self._fit()

    def _fit(self) -> None:
        level = float(_FLAT @ self._moments @ _FLAT)
        if level <= 0.0:
            return
        scale = float(_FLAT @ self._products) / level
        moments = self._moments * (scale / _NOISE) ** 2 + _PULL
        products = self._products * (scale / _NOISE**2) + _PULL @ _FLAT
        terms: Floats = np.asarray(np.linalg.solve(moments, products), dtype=np.float64)
        while (below := np.flatnonzero(terms[_NUM:] < 0.0)).size:
            # nothing gets cheaper by drafts: hold that term at 0 and fit the others again
            held = _NUM + below
            moments[held, :] = moments[:, held] = 0.0
            moments[held, held], products[held] = 1.0, 0.0
            terms = np.asarray(np.linalg.solve(moments, products), dtype=np.float64)
            terms[held] = 0.0
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
        # octave -> milliseconds, and how often it was seen
        self._known: dict[int, tuple[float, int]] = {}

    def spent(self, num_requests: int, ms: float) -> None:
        """So many requests took so long. An octave's first time may hold what is done once: it counts only where no
        other is known, and until the second."""
        octave = num_requests.bit_length()
        known, times = self._known.get(octave, (0.0, 0))
        if times > 1:
            ms = min(ms, 2.0 * known)  # a single time that holds more than asking does not spoil the price
        weight = max(1.0 / max(times, 1), 1.0 - PRICE_MEMORY)
        self._known[octave] = (known + weight * (ms - known), times + 1)

    def of(self, num_requests: int) -> float:
        """What it takes for so many requests; where that is not known, as for the nearest number that is. 0.0: nothing
        is known, or nothing is to be done."""
        if not self._known or num_requests == 0:
            return 0.0
        octave = num_requests.bit_length()
        known = [own for own, (_, times) in self._known.items() if times > 1] or self._known
        return self._known[min(known, key=lambda own: (abs(own - octave), own))][0]

    def is_dear(self, num_requests: int, step_ms: float) -> bool:
        """Whether it must be worth what it takes; not where a step's time is not known (0.0)."""
        return self.of(num_requests) > CHEAP * step_ms > 0.0

    def up_to(self, num_requests: int) -> Floats:
        """[num_requests + 1] what it takes for 0, 1, 2, ... requests."""
        octaves = [self.of(1 << octave >> 1) for octave in range(num_requests.bit_length() + 1)]
        return np.asarray(octaves)[np.frexp(np.arange(num_requests + 1))[1]]


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
        self.debts: dict[str, float] = {}
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
            self.debts[name] = min(ms, MOST_OWED * limit_ms)

    def passed(self, timing: StepTiming | None) -> None:
        """A step is over, which pays for itself; None: its time is not known."""
        if timing is not None:
            self._last_batch = timing.batch
            if timing.is_decode_only and 0.0 < (ms := timing.step_ms - timing.ask_ms) < math.inf:
                self._rest.spent(timing.batch, ms)
        if self.debts:
            paid = self.limit_ms(self._last_batch)
            self.debts = {name: owed - paid for name, owed in self.debts.items() if owed > paid}


def _features(timing: StepTiming) -> Floats:
    """[_SIZE] what multiplies the terms."""
    x = np.zeros(_SIZE)
    rows = min(float(timing.batch + timing.nodes), _KNOTS[-1])
    left = min(bisect_right(_KNOTS, rows) - 1, _NUM - 2)
    share = (rows - _KNOTS[left]) / (_KNOTS[left + 1] - _KNOTS[left])
    x[left], x[left + 1] = 1.0 - share, share
    x[_AT_DRAFT], x[_AT_BRANCH] = timing.nodes > 0, timing.branches
    return x


def _pull() -> Floats:
    """[_SIZE, _SIZE] precision of what is believed before any step: the table is straight, flat and of any height."""
    slopes = np.diff(np.eye(_SIZE)[:_NUM], axis=0) / np.diff(KNOTS)[:, None]
    rises = slopes * KNOTS[:-1, None] / _RISE
    bends = np.diff(slopes, axis=0) * KNOTS[1:-1, None] / _BEND
    others = np.diag([1e-2] + [0.0] * (_NUM - 1) + [_DRAFT**-2, _BRANCH**-2])
    return np.asarray(rises.T @ rises + bends.T @ bends + others, dtype=np.float64)


_PULL: Floats = _pull()
