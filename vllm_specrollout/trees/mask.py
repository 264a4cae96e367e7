"""Masks of tree attention: which nodes of a draft tree see which.

May enter: the carriers and numpy. May not: torch, vLLM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import MOST_NODES, ROOT, IntArray, TreeBatch


def ancestor_mask(parents: IntArray) -> npt.NDArray[np.uint64]:
    """[N] bit j (least significant first) of row i is set if and only if node j is node i or an ancestor of it.

    Raises:
        ValueError: more nodes than a word has bits.
    """
    if len(parents) > MOST_NODES:
        raise ValueError(f"{len(parents)} nodes do not fit the {MOST_NODES} bits of a mask")
    rows: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        rows.append((1 << node) | (0 if parent == ROOT else rows[parent]))
    return np.asarray(rows, dtype=np.uint64)


def ancestor_masks(trees: TreeBatch) -> npt.NDArray[np.uint64]:
    """[N] `ancestor_mask` of every tree, one behind another; nodes count from their own request's first.

    Raises:
        ValueError: a tree has more nodes than a word has bits.
    """
    if trees.sizes.max(initial=0) > MOST_NODES:
        raise ValueError(f"{trees.sizes.max()} nodes do not fit the {MOST_NODES} bits of a mask")
    starts = np.repeat(trees.node_start[:-1], trees.sizes)
    masks = np.uint64(1) << (np.arange(trees.num_nodes) - starts).astype(np.uint64)
    above = trees.parents + starts
    for depth in range(2, int(trees.depth.max(initial=0)) + 1):
        level = np.flatnonzero(trees.depth == depth)
        masks[level] |= masks[above[level]]
    return masks
