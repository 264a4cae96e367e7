"""What the drafters would have proposed: recorded trees, also where the recording has no root.

A replayed budget verifies less or more than the recorded one, so it stands at positions at which nothing was recorded.
There the last tree recorded before it is followed along the truth, and what hangs below is the proposal: smaller than
a fresh one, never better.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_specrollout.replay.records import Trace
from vllm_specrollout.trees.build import depths, select
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import EMPTY_TREE, ROOT, Decision, DraftTree, IntArray, TreeBatch, empty_trees


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
        return below(self._trees[request][root], truth[root:position])


def below(tree: DraftTree, path: Sequence[int] | IntArray) -> DraftTree:
    """The subtree under the node that these tokens lead to from the root; empty if they leave the tree."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    }
    node = ROOT
    for token in path:
        child = children.get((node, int(token)))
        if child is None:
            return EMPTY_TREE
        node = child
    if node == ROOT:
        return tree
    kept = [node]
    known = {node}
    for i, parent in enumerate(tree.parents.tolist()):
        if parent in known:
            known.add(i)
            kept.append(i)
    if len(kept) == 1:
        return EMPTY_TREE
    subtree = select(replace(tree, parents=_cut_at(tree.parents, node)), kept)
    # its first node is the new root: every index below it moves up by one
    return DraftTree(subtree.token_ids[1:], subtree.parents[1:] - 1, subtree.log_q[1:], subtree.source[1:])


def _cut_at(parents: IntArray, node: int) -> IntArray:
    """The same parents, with `node` as a root."""
    changed = parents.copy()
    changed[node] = ROOT
    return changed


def batch_of(request_ids: Sequence[str], trees: Sequence[DraftTree]) -> TreeBatch:
    """The trees of a batch, one behind another; [R] each."""
    sizes = [tree.size for tree in trees]
    node_start = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=node_start[1:])
    if not node_start[-1]:
        return empty_trees(request_ids)
    full = [tree for tree in trees if tree.size]
    return TreeBatch(
        request_ids,
        node_start,
        np.concatenate([tree.token_ids for tree in full]),
        np.concatenate([tree.parents for tree in full]),
        np.concatenate([tree.log_q for tree in full]),
        np.concatenate([tree.source for tree in full]),
        np.concatenate([depths(tree.parents) for tree in full]),
    )


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


def cut(tree: DraftTree, decision: Decision) -> DraftTree:
    """What a drafter would have proposed under this decision: it heeds nodes, depth and shape, not probabilities."""
    if not tree.size:
        return tree
    return prune(tree, replace(decision, min_probability=0.0, path_cost=0.0))
