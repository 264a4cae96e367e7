"""How long answers become, from how long they became: per problem, revised as an answer grows.

Pure: lengths in, expectations out.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

_PER_PROBLEM = 64  # recent answers remembered of each problem
_PROBLEMS = 65_536  # problems remembered; those seen least recently go first
_OVERALL = 2048  # recent answers of all problems
_ENOUGH = 4  # of the problem's own earlier answers that got as far; with fewer, other problems' help out
_LEAST_TRUST = 0.5  # in the answers of a known problem: where they mislead, half of the weight is right all the same
_OFF_WEIGHT = 0.05  # of one answer in how far guesses are off, at the least
_BEYOND = (0.15, 0.4, 0.85, 2.0)  # what an answer longer than all known ones still needs, as shares of its length


class _Recent:
    """The last n lengths, in order of age and in order of size."""

    def __init__(self, n: int) -> None:
        self._by_age: deque[int] = deque()
        self.sorted: list[int] = []
        self._n = n

    def add(self, length: int) -> None:
        if len(self._by_age) == self._n:
            del self.sorted[bisect.bisect_left(self.sorted, self._by_age.popleft())]
        self._by_age.append(length)
        bisect.insort(self.sorted, length)

    def above(self, generated: int) -> list[int]:
        """The lengths above `generated`, rising."""
        return self.sorted[bisect.bisect_right(self.sorted, generated) :]

    def mean_above(self, generated: int) -> float | None:
        """Mean of the lengths above `generated`; None if there are none."""
        longer = self.above(generated)
        return sum(longer) / len(longer) if longer else None


class _Off:
    """How far an answer's length is from the mean of those before it, as a share of the longer of both."""

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self._seen = 2  # answers that what is guessed at first counts for

    def approach(self, length: int, known: list[int]) -> None:
        expected = sum(known) / len(known)
        self._seen += 1
        self.mean += max(_OFF_WEIGHT, 1.0 / self._seen) * (
            abs(length - expected) / max(length, expected, 1.0) - self.mean
        )


class Lengths:
    """Remembers how long answers became, and expects the like."""

    def __init__(self) -> None:
        self._problems: OrderedDict[str, _Recent] = OrderedDict()
        self._overall = _Recent(_OVERALL)
        self._own_off, self._overall_off = _Off(0.25), _Off(0.5)

    def observe(self, problem_id: str, length: int) -> None:
        """An answer ended after `length` tokens."""
        recent = self._problems.get(problem_id)
        if recent is None:
            recent = self._problems[problem_id] = _Recent(_PER_PROBLEM)
            if len(self._problems) > _PROBLEMS:
                self._problems.popitem(last=False)
        self._problems.move_to_end(problem_id)
        if len(recent.sorted) >= _ENOUGH:
            self._own_off.approach(length, recent.sorted)
        if self._overall.sorted:
            self._overall_off.approach(length, self._overall.sorted)
        recent.add(length)
        self._overall.add(length)

    def expected_total(self, problem_id: str, generated: int, max_total: int) -> float:
        """Expected length in tokens of an answer that has reached `generated` tokens and cannot exceed `max_total`.

        The mean of the problem's earlier answers that got further than this one; if none did, of all problems'; if
        none did either, half as long again as it is. (What has outgrown all experience is expected to go on in
        proportion to its length: the remaining life of a power-law tail.)
        """
        own = self._problems.get(problem_id)
        expected = own.mean_above(generated) if own is not None else None
        if expected is None:
            expected = self._overall.mean_above(generated)
        if expected is None:
            expected = 1.5 * generated + 1.0
        return min(expected, float(max_total))

    def remaining(self, problem_id: str, generated: int, max_total: int, n: int) -> npt.NDArray[np.float64]:
        """[n] equally likely values of what an answer still needs, in tokens, rising, each at least 1.

        Given that it has got this far, it ends like one of the problem's earlier answers that got further; few of
        those are joined by as many of all problems' as are missing. What has outgrown all of them goes on in
        proportion to its length.
        """
        own = self._problems.get(problem_id)
        known = own.above(generated) if own is not None else []
        if len(known) < _ENOUGH:
            others = self._overall.above(generated)
            if others:
                places = (np.arange(_ENOUGH - len(known)) + 0.5) / (_ENOUGH - len(known)) * len(others)
                known = sorted(known + [others[int(place)] for place in places])
        values = np.asarray(known, dtype=np.float64) - generated
        if not len(values):
            values = np.asarray(_BEYOND) * max(generated, 16)
        places = (np.arange(n) + 0.5) / n * len(values) - 0.5
        spread = np.interp(places, np.arange(len(values)), values)
        return np.clip(spread, 1.0, max(max_total - generated, 1))

    def trust(self, problem_id: str) -> float:
        """How far guesses at the problem's answers may be trusted, from 0 to 1 (all have been equally long so far).

        At least 0.5 where enough of the problem's own answers are known; where not, only if all answers are much alike.
        """
        if self.knows(problem_id):
            return max(_LEAST_TRUST, 1.0 - 2.0 * self._own_off.mean)
        return max(0.0, 1.0 - 4.0 * self._overall_off.mean)

    @property
    def num_known(self) -> int:
        """Recent answers whose length is remembered."""
        return len(self._overall.sorted)

    @property
    def mean(self) -> float:
        """Mean of recent answers' lengths in tokens; 1.0 before any is known."""
        known = self._overall.sorted
        return sum(known) / len(known) if known else 1.0

    def knows(self, problem_id: str) -> bool:
        """Whether enough of the problem's own answers have ended for a guess."""
        own = self._problems.get(problem_id)
        return own is not None and len(own.sorted) >= _ENOUGH
