"""Draft trees as tests make and judge them: tries from weighted paths, unions, and the invariants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_specrollout.trees.build import cumulative_log_q, order
from vllm_specrollout.types import ROOT, DraftTree, IntArray

LEAST_PROBABILITY = 1e-9
"""Stands in for a probability of 0, so that log_q is finite."""


def is_ordered(tree: DraftTree) -> bool:
    """Whether every prefix is the best subtree of its size."""
    total = cumulative_log_q(tree)
    return all(a >= b for a, b in zip(total, total[1:], strict=False))


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
    return first_nodes(order(_tree(token_ids, parents, log_q, [source] * len(parents))), max_nodes)


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
    return first_nodes(order(_tree(token_ids, parents, log_q, source)), max_nodes)


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The tree's first `count` nodes, which are the best ones if it is in order; the tree itself if it has no more."""
    if tree.size <= count:
        return tree
    return DraftTree(tree.token_ids[:count], tree.parents[:count], tree.log_q[:count], tree.source[:count])


def is_chain(tree: DraftTree) -> bool:
    """Whether every node hangs on the one before it."""
    n = tree.size
    return tree.parents.tolist() == list(range(ROOT, n - 1))


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


def assert_same(tree: DraftTree, expected: DraftTree) -> None:
    """To the bit; but for the sources, which twins do not know."""
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.log_q.tobytes() == expected.log_q.tobytes()


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


def _tree(*columns: Sequence[float]) -> DraftTree:
    kinds = (np.int32, np.int32, np.float32, np.int32)
    return DraftTree(*(np.asarray(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def _log(probability: float) -> float:
    return math.log(min(max(probability, LEAST_PROBABILITY), 1.0))
