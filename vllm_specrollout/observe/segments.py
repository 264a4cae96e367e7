"""Steps of one request in a row: what is summed over them, and how many segments become few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(slots=True)
class Segment:
    """Steps of one request in a row; sums over them."""

    # tokens of the answer when it began, and when it was over
    first: int
    end: int
    # seconds
    begin_s: float
    end_s: float
    # why -> steps
    reasons: dict[str, int]
    # draft nodes verified for this request, and accepted
    nodes: int = 0
    accepted: int = 0
    # accepted nodes that the budget expected; 0.0 where it has no expectation
    expected: float = 0.0
    # steps whose time the budget expected, and the milliseconds: with all their drafts, and without any
    foretold: int = 0
    expected_ms: float = 0.0
    plain_ms: float = 0.0
    # running requests that could be drafted for
    batch: int = 0

    @property
    def steps(self) -> int:
        return sum(self.reasons.values())

    def merge(self, later: Segment) -> None:
        """Go on to the end of the segment that follows."""
        self.end, self.end_s = later.end, later.end_s
        for reason, steps in later.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + steps
        self.nodes += later.nodes
        self.accepted += later.accepted
        self.expected += later.expected
        self.foretold += later.foretold
        self.expected_ms += later.expected_ms
        self.plain_ms += later.plain_ms
        self.batch += later.batch


def summarise(segments: Sequence[Segment], most: int) -> list[Segment]:
    """At most so many segments of the same steps: neighbours that are most alike in their reasons are joined first.

    Joining costs the squared distance of both mixes of reasons, weighed by their steps (Ward, "Hierarchical grouping to
    optimize an objective function", 1963). So steps that alternate are joined, and a long phase of its own stays.
    """
    kept = [replace(segment, reasons=dict(segment.reasons)) for segment in segments]
    while len(kept) > max(most, 1):
        i = min(range(len(kept) - 1), key=lambda i: _loss(kept[i], kept[i + 1]))
        kept[i].merge(kept.pop(i + 1))
    return kept


def _loss(a: Segment, b: Segment) -> float:
    n, m = a.steps, b.steps
    names = a.reasons.keys() | b.reasons.keys()
    apart = sum((a.reasons.get(name, 0) / n - b.reasons.get(name, 0) / m) ** 2 for name in names)
    return n * m / (n + m) * apart
