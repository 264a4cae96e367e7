"""All trees of a step laid end to end, so that one numpy call serves every node of the batch.

What belongs here: indices. What nodes are worth is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, Feedback, FloatArray, IntArray

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Forest:
    """N nodes of R requests' trees; a request without a tree has none."""

    # [R + 1] first node of each request
    node_start: Index
    # [N] node -> request
    owner: Index
    # [N] node -> its parent among all nodes; N for nodes of depth 1
    parent: Index
    # [N] natural log of the probability that a node is accepted given that its parent is
    log_q: FloatArray
    # [N] node -> index into the engine's list of drafters
    source: IntArray

    @property
    def size(self) -> int:
        return len(self.owner)

    def sum_from_root(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[N] the sum of `values` [N] over each node and its ancestors."""
        total = np.append(values, 0.0)
        ancestor = np.append(self.parent, self.size)
        # each round doubles how many ancestors are in the sum
        while (ancestor < self.size).any():
            total = total + total[ancestor]
            ancestor = ancestor[ancestor]
        return total[:-1]

    def depths(self) -> Index:
        """[N] 1 for the nodes below the root."""
        return self.sum_from_root(np.ones(self.size)).astype(np.int64)

    def is_first_child(self) -> npt.NDArray[np.bool_]:
        """[N] whether no earlier node has the same parent; every later one opens another path."""
        n = self.size
        key = np.where(self.parent < n, self.parent, n + self.owner)
        first = np.empty(n + len(self.node_start), dtype=np.int64)
        # of several writes to one place the last one stays: backwards, that is the first node
        first[key[::-1]] = np.arange(n - 1, -1, -1)
        return first[key] == np.arange(n)


def forest_of(trees: Sequence[DraftTree | Feedback]) -> Forest:
    """Lay trees, or verified drafts, end to end."""
    sizes = np.asarray([len(tree.parents) for tree in trees], dtype=np.int64)
    node_start = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum(sizes, out=node_start[1:])
    n = int(node_start[-1])
    owner = np.repeat(np.arange(len(trees)), sizes)
    if not n:
        return Forest(node_start, owner, owner, np.zeros(0, np.float32), np.zeros(0, np.int32))
    parts = [tree for tree in trees if len(tree.parents)]
    parents = np.concatenate([tree.parents for tree in parts]).astype(np.int64)
    return Forest(
        node_start,
        owner,
        np.where(parents == ROOT, n, parents + node_start[owner]),
        np.concatenate([tree.log_q for tree in parts]),
        np.concatenate([tree.source for tree in parts]),
    )


def kept(trees: Sequence[DraftTree], forest: Forest, keep: npt.NDArray[np.bool_]) -> list[DraftTree]:
    """The trees of the nodes to keep, in their order; `keep` [N] must hold every kept node's parent."""
    if keep.all():
        return list(trees)
    nodes = np.flatnonzero(keep)
    if not len(nodes):
        return [EMPTY_TREE] * len(trees)
    owner = forest.owner[nodes]
    ends = np.cumsum(np.bincount(owner, minlength=len(trees)))
    starts = ends - np.bincount(owner, minlength=len(trees))
    position = np.cumsum(keep) - 1
    parent = forest.parent[nodes]
    # nodes of depth 1 have no parent to renumber
    parents = np.where(parent < forest.size, position[np.minimum(parent, forest.size - 1)] - starts[owner], ROOT)
    tokens = np.concatenate([tree.token_ids for tree in trees if tree.size])[nodes]
    parents, log_q, source = parents.astype(np.int32), forest.log_q[nodes], forest.source[nodes]
    return [
        DraftTree(tokens[a:b], parents[a:b], log_q[a:b], source[a:b]) if b > a else EMPTY_TREE
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
