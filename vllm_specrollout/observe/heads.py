"""Heads of one drafter, one after another: which one serves, and whether it is as good as the one before. Pure.

A head that was loaded is on probation for some verified positions. It is compared with the one before by how often
first choices are met, depth by depth: how deep is drafted may differ between them, and deep ones are met less often. Of
an earlier policy, or of requests whose keys an earlier head computed, nothing counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import MOST_NODES, TreeBatch, VerifyResult

POSITIONS = 2000
"""Verified positions that a new head is judged by."""
ERRORS = 2.0
"""Standard errors by which it may be worse when they are over."""
_REMEMBERED = 2 * POSITIONS  # positions of a head that has proved itself: with more, all count half

Counts = npt.NDArray[np.float64]
"""[2, 1 + MOST_NODES] by depth: positions that a first choice was verified at, and those where it was met."""


def counted(trees: TreeBatch, result: VerifyResult, source: int, names: Collection[str] | None = None) -> Counts:
    """What a step says of the first choices of a source; a node whose parent was rejected says nothing.

    Args:
        names: requests that count; None: all do.
    """
    starts = trees.node_start[:-1]
    # the last entry is the root of all trees
    holds = np.zeros(trees.num_nodes + 1, np.bool_)
    holds[result.accepted + np.repeat(starts, result.num_accepted)] = holds[-1] = True
    parents = np.where(trees.parents < 0, -1, trees.parents + np.repeat(starts, trees.sizes))
    owner = np.repeat(np.arange(len(starts)), trees.sizes)
    seen = (trees.source == source) & holds[parents]
    if names is not None:
        seen &= np.array([name in names for name in trees.request_ids], np.bool_)[owner]
    # of a parent's children the first is the likeliest; roots are told apart by their requests
    _, first = np.unique(np.where(parents < 0, -1 - owner, parents)[seen], return_index=True)
    nodes = np.flatnonzero(seen)[first]
    both = (trees.depth[of] for of in (nodes, nodes[holds[nodes]]))
    return np.stack([np.bincount(depth, minlength=1 + MOST_NODES) for depth in both]).astype(np.float64)


def difference(old: Counts, new: Counts) -> float:
    """How much more often the new head is met, in standard errors: the statistic of Cochran (1954) and of Mantel and
    Haenszel (1959), over depths. 0: there is nothing to compare."""
    total = old + new
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.nan_to_num(old[0] * new[0] / total[0])
        rates, pooled = np.nan_to_num(new[1] / new[0] - old[1] / old[0]), np.nan_to_num(total[1] / total[0])
    variance = float((weights * pooled * (1.0 - pooled)).sum())
    return float((weights * rates).sum()) / math.sqrt(variance) if variance > 0.0 else 0.0


def is_worse(old: Counts, new: Counts) -> bool:
    """Whether the new head is worse, as far as its positions say by now.

    Asked after each step. So few positions have to say more: the sum of the differences is held against what `ERRORS`
    are after all of them (O'Brien and Fleming, 1979), and one as good as the old is found worse one time in twenty-two.
    """
    return difference(old, new) < -ERRORS * math.sqrt(POSITIONS / max(new[0].sum(), 1.0))


class Heads:
    """The heads of one drafter since the engine began with number 0.

    Args:
        source: of the drafter's first choices.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self.weights_version: Callable[[], int] = lambda: 0
        """Of the policy."""
        self.number = 0
        """Of the head that serves."""
        self.went_back = 0
        """How often a new one was worse."""
        self.verdict: tuple[int, bool] | None = None
        """Number of a head whose probation is over, and whether it stays; until somebody takes it."""
        # by their numbers, the heads that served when they were loaded; -1: none did
        self._parents = [-1]
        # of the head that serves, and of its parent while it is on probation
        self._now: Counts = np.zeros((2, 1 + MOST_NODES))
        self._before: Counts | None = None
        self._version = 0
        # requests that came since the head on probation serves; None: all count
        self._admitted: set[str] | None = None

    @property
    def parent(self) -> int:
        return self._parents[self.number]

    @property
    def is_on_probation(self) -> bool:
        return self._before is not None

    def load(self, *, is_judged: bool) -> int:
        """The next head serves from now on; returns its number. Where nothing is known of the last one, it stays."""
        self._parents.append(self.number)
        self.number = len(self._parents) - 1
        self.verdict = (self.number, True) if is_judged and not self._now.any() else None
        self._before, self._now = (self._now if is_judged else None), np.zeros_like(self._now)
        self._admitted = set() if is_judged else None
        return self.number

    def judged(self, *, stays: bool) -> None:
        """Its probation is over; where it does not stay, its parent serves again."""
        if not stays:
            self.went_back += 1
            self.number = self.parent
            self._now = self._now if self._before is None else self._before
        self._before = self._admitted = self.verdict = None

    def admit(self, request_id: str) -> None:
        if self._admitted is not None:
            self._admitted.add(request_id)

    def forget(self, request_id: str) -> None:
        if self._admitted is not None:
            self._admitted.discard(request_id)

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        """What became of a step's drafts, whichever drafter made them."""
        if self.verdict is not None:
            return
        if (version := self.weights_version()) != self._version:
            # the rates of the old policy are no measure
            self._version, self._now = version, np.zeros_like(self._now)
            self.verdict = (self.number, True) if self.is_on_probation else None
            return
        self._now += counted(trees, result, self._source, self._admitted)
        if self._before is not None:
            if is_worse(self._before, self._now):
                self.verdict = self.number, False
            elif self._now[0].sum() >= POSITIONS:
                self.verdict = self.number, True
        elif self._now[0].sum() >= _REMEMBERED:
            self._now *= 0.5

    def as_dict(self) -> dict[str, Any]:
        """In plain JSON types. "match_rate" is that of the head that serves, "match_rate_before" its parent's when it
        was loaded, while it is on probation; None: nothing is known."""
        return {
            "number": self.number,
            "parent": self.parent,
            "is_on_probation": self.is_on_probation,
            "went_back": self.went_back,
            "match_rate": _rate(self._now),
            "match_rate_before": None if self._before is None else _rate(self._before),
        }


def _rate(counts: Counts) -> float | None:
    verified, met = counts.sum(axis=1).tolist()
    return met / verified if verified else None
