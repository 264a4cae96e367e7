"""Making draft trees: best-first order, tries from weighted paths, unions, and the invariants.

May enter: the carriers and numpy. May not: torch, vLLM, clocks, randomness.

A tree has at most 64 nodes, so plain loops over lists beat numpy here: its fixed cost per call is the whole cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, IntArray

LEAST_PROBABILITY = 1e-9
"""Stands in for a probability of 0, so that log_q is finite."""

_STRAIGHT_NODES = 64
# a chain's parents, as bytes: comparing with it takes a tenth of what making them anew takes
_STRAIGHT = np.arange(ROOT, _STRAIGHT_NODES - 1, dtype=np.int32).tobytes()


def cumulative_log_q(tree: DraftTree) -> list[float]:
    """[N] natural log of the probability that the target walks all the way from the root to the node."""
    total: list[float] = []
    for parent, log_q in zip(tree.parents.tolist(), tree.log_q.tolist(), strict=True):
        total.append(log_q if parent == ROOT else total[parent] + log_q)
    return total


def is_ordered(tree: DraftTree) -> bool:
    """Whether every prefix is the best subtree of its size."""
    total = cumulative_log_q(tree)
    return all(a >= b for a, b in zip(total, total[1:], strict=False))


def order(tree: DraftTree) -> DraftTree:
    """Sort the nodes best first, so that every prefix is the best subtree of its size.

    The expected number of accepted tokens of a subtree is the sum of its nodes' cumulative probabilities, and no child
    has a larger one than its parent. So expanding the most probable reachable node, again and again, is optimal for
    every size at once. Ties go to the node whose parent was placed earlier, then to the one that came earlier.
    """
    return _best_first(tree, tree.size)


def from_paths(
    paths: Sequence[tuple[Sequence[int], float]], max_nodes: int, max_depth: int, source: int = 0
) -> DraftTree:
    """The best `max_nodes` nodes of the trie of weighted paths.

    A node's probability is the weight of the paths through it over that of the paths through its parent: a path that
    ends at the parent speaks against all its children.

    Args:
        paths: (token ids from the root down, positive weight).
        max_nodes: most nodes kept.
        max_depth: tokens of a path beyond this depth are ignored.
        source: index of the drafter in the engine's list.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    weights: list[float] = []
    children: dict[tuple[int, int], int] = {}
    for path, weight in paths:
        node = ROOT
        for token in path[:max_depth]:
            child = children.get((node, token))
            if child is None:
                child = children[node, token] = len(token_ids)
                token_ids.append(int(token))
                parents.append(node)
                weights.append(0.0)
            weights[child] += weight
            node = child
    total = sum(weight for _, weight in paths)
    log_q = [
        _log(weight / (total if parent == ROOT else weights[parent]))
        for parent, weight in zip(parents, weights, strict=True)
    ]
    return _best_first(_tree(token_ids, parents, log_q, [source] * len(parents)), max_nodes)


def union(trees: Sequence[DraftTree], max_nodes: int) -> DraftTree:
    """The best `max_nodes` nodes of several drafters' trees laid over each other.

    Nodes with the same tokens from the root down become one, with the largest of their probabilities and the source of
    the node that had it (the earlier tree's when equal).
    """
    token_ids: list[int] = []
    parents: list[int] = []
    log_q: list[float] = []
    source: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for tree in trees:
        merged: list[int] = []
        columns = (tree.token_ids.tolist(), tree.parents.tolist(), tree.log_q.tolist(), tree.source.tolist())
        for token, old_parent, node_log_q, node_source in zip(*columns, strict=True):
            parent = ROOT if old_parent == ROOT else merged[old_parent]
            node = children.get((parent, token))
            if node is None:
                node = children[parent, token] = len(token_ids)
                token_ids.append(token)
                parents.append(parent)
                log_q.append(node_log_q)
                source.append(node_source)
            elif node_log_q > log_q[node]:
                log_q[node], source[node] = node_log_q, node_source
            merged.append(node)
    return _best_first(_tree(token_ids, parents, log_q, source), max_nodes)


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


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The tree's first `count` nodes, which are the best ones if it is in order; the tree itself if it has no more."""
    if tree.size <= count:
        return tree
    return DraftTree(tree.token_ids[:count], tree.parents[:count], tree.log_q[:count], tree.source[:count])


def is_chain(tree: DraftTree) -> bool:
    """Whether every node hangs on the one before it."""
    n = tree.size
    straight = _STRAIGHT if n <= _STRAIGHT_NODES else np.arange(ROOT, n - 1, dtype=np.int32).tobytes()
    return straight.startswith(tree.parents.tobytes())


def check(tree: DraftTree) -> None:
    """Verify what every reader of a tree relies on; `is_ordered` verifies the promise about its prefixes.

    Raises:
        ValueError: lengths or dtypes differ, a parent comes after its child, two siblings hold the same token, or a
            probability lies outside (0, 1].
    """
    for name, dtype in (("token_ids", np.int32), ("parents", np.int32), ("log_q", np.float32), ("source", np.int32)):
        array = getattr(tree, name)
        if array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype}, not {np.dtype(dtype)}")
        if array.shape != (tree.size,):
            raise ValueError(f"{name} has shape {array.shape}, not ({tree.size},)")
    seen: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} has parent {parent}, which does not come before it")
        if (parent, token) in seen:
            raise ValueError(f"nodes {seen[parent, token]} and {node} are siblings with the same token {token}")
        seen[parent, token] = node
    for node, log_q in enumerate(tree.log_q.tolist()):
        if not (math.isfinite(log_q) and log_q <= 0.0):
            raise ValueError(f"node {node} has log_q {log_q}, not the log of a probability above 0 and at most 1")


def depths(parents: IntArray) -> IntArray:
    """[N] node -> its distance from the root, from 1."""
    result: list[int] = []
    for parent in parents.tolist():
        result.append(1 if parent == ROOT else result[parent] + 1)
    return np.asarray(result, dtype=np.int32)


def path_to(parents: IntArray, node: int) -> list[int]:
    """The nodes from the root (exclusive) down to `node` (inclusive)."""
    path = []
    while node != ROOT:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def num_paths(parents: IntArray) -> int:
    """How many root-to-leaf paths, that is leaves, there are."""
    return len(parents) - len(set(parents.tolist()) - {ROOT})


def _best_first(tree: DraftTree, max_nodes: int) -> DraftTree:
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
    while frontier and len(chosen) < max_nodes:
        _, _, node = heapq.heappop(frontier)
        for child in children.get(node, ()):
            heapq.heappush(frontier, (-total[child], len(chosen), child))
        chosen.append(node)
    return select(tree, chosen)


def _tree(token_ids: list[int], parents: list[int], log_q: list[float], source: list[int]) -> DraftTree:
    return DraftTree(
        np.asarray(token_ids, dtype=np.int32),
        np.asarray(parents, dtype=np.int32),
        np.asarray(log_q, dtype=np.float32),
        np.asarray(source, dtype=np.int32),
    )


def _log(probability: float) -> float:
    return math.log(min(max(probability, LEAST_PROBABILITY), 1.0))
