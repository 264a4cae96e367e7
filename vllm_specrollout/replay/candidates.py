"""What the drafters would have proposed: recorded trees, also where the recording has no root.

A replayed budget verifies less or more than the recorded one, so it stands at positions at which nothing was recorded.
There the last tree recorded before it is followed along the truth, and what hangs below is the proposal: smaller than
a fresh one, never better.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from vllm_specrollout.replay.records import Trace
from vllm_specrollout.trees.build import select
from vllm_specrollout.trees.follow import below
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, IntArray


class RecordedTrees:
    """The proposals of one trace."""

    def __init__(self, trace: Trace) -> None:
        recorded: dict[int, dict[int, DraftTree]] = {}
        for step in trace.steps:
            for candidates in step.candidates:
                # a request drafted for twice at one position was preempted in between: the later tree counts
                recorded.setdefault(candidates.request, {})[candidates.position] = candidates.tree
        self._trees = recorded
        self._positions = {request: sorted(trees) for request, trees in recorded.items()}

    def at(self, request: int, position: int, truth: Sequence[int] | IntArray) -> DraftTree:
        """The proposal for a request that has generated `position` tokens of its `truth`; empty if none is known."""
        positions = self._positions.get(request, [])
        nearest = bisect.bisect_right(positions, position) - 1
        if nearest < 0:
            return EMPTY_TREE
        root = positions[nearest]
        return below(self._trees[request][root], truth[root:position])[0] or EMPTY_TREE


def of_sources(tree: DraftTree, wanted: int) -> DraftTree:
    """What is left of a draft if only some drafters were asked; a node without its parent goes too.

    Args:
        wanted: bit d: drafter d was asked.
    """
    kept: list[int] = []
    known = {ROOT}
    for i, (parent, source) in enumerate(zip(tree.parents.tolist(), tree.source.tolist(), strict=True)):
        if parent in known and wanted >> source & 1:
            known.add(i)
            kept.append(i)
    return tree if len(kept) == tree.size else select(tree, kept)
