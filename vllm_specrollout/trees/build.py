"""Making draft trees: best-first order, the tree of some nodes, and depths.

May enter: the carriers and numpy. May not: torch, vLLM, clocks, randomness.

A tree has at most 64 nodes, so plain loops over lists beat numpy here: its fixed cost per call is the whole cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, IntArray


def cumulative_log_q(tree: DraftTree) -> list[float]:
    """[N] natural log of the probability that the target walks all the way from the root to the node."""
    total: list[float] = []
    for parent, log_q in zip(tree.parents.tolist(), tree.log_q.tolist(), strict=True):
        total.append(log_q if parent == ROOT else total[parent] + log_q)
    return total


def order(tree: DraftTree) -> DraftTree:
    """Sort the nodes best first, so that every prefix is the best subtree of its size.

    The expected number of accepted tokens of a subtree is the sum of its nodes' cumulative probabilities, and no child
    has a larger one than its parent. So expanding the most probable reachable node, again and again, is optimal for
    every size at once. Ties go to the node whose parent was placed earlier, then to the one that came earlier.
    """
    if not tree.size:
        return EMPTY_TREE
    total = cumulative_log_q(tree)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    chosen: list[int] = []
    # (-cumulative log_q, place of the parent, node): the ties' rule is the tuple's order
    frontier = [(-total[node], ROOT, node) for node in children[ROOT]]
    heapq.heapify(frontier)
    while frontier:
        _, _, node = heapq.heappop(frontier)
        for child in children.get(node, ()):
            heapq.heappush(frontier, (-total[child], len(chosen), child))
        chosen.append(node)
    return select(tree, chosen)


def below(tree: DraftTree, path: Sequence[int]) -> DraftTree:
    """The subtree under the node that these tokens lead to from the root; empty where they leave the tree."""
    parents, top = tree.parents.tolist(), ROOT
    children = {key: child for child, key in enumerate(zip(parents, tree.token_ids.tolist(), strict=True))}
    for token in path:
        if (top, token) not in children:
            return EMPTY_TREE
        top = children[top, token]
    kept = {top: None}
    for child, parent in enumerate(parents):
        if parent in kept:
            kept[child] = None
    return select(tree, list(kept)[1:], top)


def select(tree: DraftTree, nodes: Sequence[int], root: int = ROOT) -> DraftTree:
    """The tree of these nodes, in this order, under a node; the parent of each must come before it."""
    new_index = {root: ROOT}
    for position, node in enumerate(nodes):
        new_index[node] = position
    old_parents = tree.parents.tolist()
    chosen = np.asarray(nodes, dtype=np.int64)
    return DraftTree(
        tree.token_ids[chosen],
        np.asarray([new_index[old_parents[node]] for node in nodes], dtype=np.int32),
        tree.log_q[chosen],
        tree.source[chosen],
    )


def depths(parents: IntArray) -> IntArray:
    """[N] node -> its distance from the root, from 1."""
    result: list[int] = []
    for parent in parents.tolist():
        result.append(1 if parent == ROOT else result[parent] + 1)
    return np.asarray(result, dtype=np.int32)
