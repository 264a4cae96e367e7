"""Expected lengths of answers, from earlier ones: per problem, revised as an answer grows.

Pure: lengths in, expectations out.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from statistics import median

_PER_PROBLEM = 64  # recent answers remembered of each problem
MOST_PROBLEMS = 65_536
"""Problems remembered; those seen least recently go first."""
_OVERALL = 2048  # recent answers of all problems


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

    def mean_above(self, generated: int) -> float | None:
        """Mean of the lengths above `generated`; None if there are none."""
        longer = self.sorted[bisect.bisect_right(self.sorted, generated) :]
        return sum(longer) / len(longer) if longer else None

    def median(self, newest: int) -> float:
        """Of the newest lengths."""
        return median(list(self._by_age)[-newest:])


class Lengths:
    """Remembers how long answers became, and expects the like."""

    def __init__(self) -> None:
        self._problems: OrderedDict[str, _Recent] = OrderedDict()
        self._overall = _Recent(_OVERALL)

    def observe(self, problem_id: str, length: int) -> None:
        """An answer ended after `length` tokens."""
        recent = self._problems.get(problem_id)
        if recent is None:
            recent = self._problems[problem_id] = _Recent(_PER_PROBLEM)
            if len(self._problems) > MOST_PROBLEMS:
                self._problems.popitem(last=False)
        self._problems.move_to_end(problem_id)
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

    def median(self, problem_id: str, newest: int) -> float | None:
        """Median length of the problem's newest answers; None: it has none.

        With as many as a problem has answers in an epoch, it is the forecast of RhymeRL, section 6.2.
        """
        recent = self._problems.get(problem_id)
        return None if recent is None else recent.median(max(newest, 1))

    @property
    def num_known(self) -> int:
        """Recent answers whose length is remembered."""
        return len(self._overall.sorted)
