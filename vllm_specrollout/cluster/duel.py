"""Duel of two arrangements: both are tried, and the one that decodes faster stays. Pure.

What belongs here: whose turn it is, and when one of them has won. Estimates need times that are not known before both
have run, and a host's speed drifts by more than they differ; so slices of both are run in turns, and compared in pairs.
The losing one takes about `LOSERS_SHARE` of all steps, however much slower it is per step.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

SETTLING = 6
"""First steps of a slice, which do not count: pipelines fill, threads begin."""
COUNTED = 18
"""Steps of a slice that count."""
LEAST_PAIRS, MOST_PAIRS = 3, 8
"""Slices of each arrangement before a winner is named: as many as it takes to be sure, within these."""
SURE = 2.0
"""Standard errors of the mean between two arrangements of which one is called faster."""
ALIKE = 0.01
"""Share by which the second arrangement must be faster: it takes more devices than the first."""
LOSERS_SHARE = 0.02
"""Of all steps, once there is a winner; afterwards both are tried again, since acceptance drifts."""
_STALL = 4.0  # times the median of a slice: such a step counts as the median, whatever it waited for


@dataclass(slots=True)
class _Contest:
    """Of batches of one size."""

    # whose turn comes first
    first: int = 0
    winner: int = 0
    # steps until both are tried again; 0: they are being tried
    rest: int = 0
    # [2] what each slice took, as the logarithm of seconds per token
    found: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    # seconds and tokens of the slice in progress, of steps that count
    slice: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0
    # steps that the arrangement which is not the winner has taken since there was one
    spent: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def turn(self) -> int:
        """0 1 1 0 0 1 1 0 ...: what drifts steadily favours neither."""
        if self.rest:
            return self.winner
        return (self.first + (sum(map(len, self.found)) + 1) // 2) % 2


class Duel:
    """Tells which arrangement is to be used; told what each step took.

    Args:
        first: arrangement to begin with.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        # bit length of the number of requests -> its contest
        self._contests: dict[int, _Contest] = {}
        self.num_requests = 0
        """Of the last step."""

    @property
    def choice(self) -> int:
        """0 or 1: the arrangement of the next step, if as many requests go on."""
        return self._contest(self.num_requests).turn

    def winner(self, num_requests: int) -> int | None:
        """Who won at batches of this size; None: both are being tried."""
        contest = self._contest(num_requests)
        return contest.winner if contest.rest else None

    def step(self, num_requests: int, tokens: int, seconds: float) -> None:
        """A step is over, in the arrangement that `choice` named before it.

        Args:
            num_requests, tokens: that were running, and that they got.
        """
        contest = self._contest(num_requests)
        is_steady = num_requests == self.num_requests and tokens > 0 and seconds > 0.0
        self.num_requests = num_requests
        if contest.rest:
            contest.rest -= 1
            return
        if not is_steady:
            return  # a prompt is among it, or an ending
        contest.steps += 1
        contest.spent[contest.turn] += 1
        if contest.steps > SETTLING:
            contest.slice.append((seconds, tokens))
        if len(contest.slice) == COUNTED:
            self._end_slice(contest)

    def _contest(self, num_requests: int) -> _Contest:
        return self._contests.setdefault(num_requests.bit_length(), _Contest(self._first))

    @staticmethod
    def _end_slice(contest: _Contest) -> None:
        usual = statistics.median(seconds for seconds, _ in contest.slice)
        spent = sum(usual if seconds > _STALL * usual else seconds for seconds, _ in contest.slice)
        contest.found[contest.turn].append(math.log(spent / sum(tokens for _, tokens in contest.slice)))
        contest.slice, contest.steps = [], 0
        winner = _winner(*contest.found)
        if winner is not None:
            contest.winner = winner
            contest.rest = round(contest.spent[1 - winner] / LOSERS_SHARE) - sum(contest.spent)
            contest.found, contest.spent = ([], []), [0, 0]


def _winner(first: list[float], second: list[float]) -> int | None:
    """Args: logarithms of seconds per token, slice by slice."""
    pairs = len(second)
    if len(first) != pairs or pairs < LEAST_PAIRS:
        return None
    gains = [one - other for one, other in zip(first, second, strict=True)]
    gain, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(pairs)
    if abs(gain - ALIKE) <= SURE * error and pairs < MOST_PAIRS:
        return None
    return int(gain > ALIKE)
