"""Stretches of one request: its steps in a row, joined until they are few enough to read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specrollout.report.rollouts import Steps
from vllm_specrollout.report.walk import Walk


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of one request in a row; sums over them."""

    # tokens of the answer when it began, and when it was over
    first: int
    end: int
    # milliseconds since the trace's first step began
    begin_ms: float
    end_ms: float
    # why a step had its draft, or none -> steps
    reasons: dict[str, int]
    # draft nodes verified for this request, and accepted
    nodes: int
    accepted: int
    # requests that ran
    running: int

    @property
    def steps(self) -> int:
        return sum(self.reasons.values())

    def joined(self, later: Stretch) -> Stretch:
        """With the one that follows."""
        names = [*self.reasons, *(name for name in later.reasons if name not in self.reasons)]
        return Stretch(
            self.first,
            later.end,
            self.begin_ms,
            later.end_ms,
            {name: self.reasons.get(name, 0) + later.reasons.get(name, 0) for name in names},
            self.nodes + later.nodes,
            self.accepted + later.accepted,
            self.running + later.running,
        )


def stretches_of(request: int, table: Walk, steps: Steps, most: int) -> list[Stretch]:
    """What a request went through, in order.

    Steps of the same reason in a row are one stretch. Beyond `most`, neighbours that are most alike in their reasons
    are joined first: joining costs the squared distance of both mixes of reasons, weighed by their steps (Ward,
    "Hierarchical grouping to optimize an objective function", 1963). So steps that alternate are joined, and a long
    phase of its own stays.
    """
    rows = slice(*table.start[request : request + 2].tolist())
    step = table.step[rows]
    end = np.cumsum(table.gained[rows])
    reasons = [{table.reasons[why]: 1} for why in table.why[rows].tolist()]
    spans = (column.tolist() for column in (end - table.gained[rows], end, steps.begin[step], steps.end[step]))
    sums = (column.tolist() for column in (table.nodes[rows], table.accepted[rows], steps.running[step]))
    kept: list[Stretch] = []
    for values in zip(*spans, reasons, *sums, strict=True):
        one = Stretch(*values)
        if kept and kept[-1].reasons.keys() == one.reasons.keys():
            kept[-1] = kept[-1].joined(one)
        else:
            kept.append(one)
    while len(kept) > max(most, 1):
        i = min(range(len(kept) - 1), key=lambda i: _loss(kept[i], kept[i + 1]))
        kept[i : i + 2] = [kept[i].joined(kept[i + 1])]
    return kept


def _loss(a: Stretch, b: Stretch) -> float:
    n, m = a.steps, b.steps
    names = a.reasons.keys() | b.reasons.keys()
    apart = sum((a.reasons.get(name, 0) / n - b.reasons.get(name, 0) / m) ** 2 for name in names)
    return n * m / (n + m) * apart
