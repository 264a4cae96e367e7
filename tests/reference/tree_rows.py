"""A step's trees laid out over its rows: the specification of `_core.tree_rows`, request by request."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.trees.mask import ancestor_mask
from vllm_specrollout.types import ROOT, DraftTree


def laid_out(
    trees: Sequence[DraftTree | None], logits_rows: Sequence[int], rows: Sequence[int]
) -> dict[str, list[int]]:
    """What the device is told of a step.

    Args:
        trees: [B] of the batch's requests, in its order; None: it has none.
        logits_rows, rows: [B] how many each has; its nodes' are the last ones, behind that of its last known token.
    """
    out: dict[str, list[int]] = {"parents": [], "tokens": [], "shift": [], "nodes": [], "sizes": [], "ancestors": []}
    for tree, num_logits, num_rows in zip(trees, logits_rows, rows, strict=True):
        size = tree.size if tree is not None else 0
        out["sizes"].append(size)
        out["parents"] += [-1] * (num_logits - size)
        out["shift"] += [0] * (num_rows - size)
        out["ancestors"] += [0] * (num_rows - size)
        depth: list[int] = []
        for node in range(size):
            assert tree is not None
            parent = int(tree.parents[node])
            depth.append(1 if parent == ROOT else depth[parent] + 1)
            # as vLLM sees it, the node stands one position behind that of its place before it
            out["shift"].append(depth[node] - 1 - node)
            out["parents"].append(parent + 1)
            out["tokens"].append(int(tree.token_ids[node]))
            out["nodes"].append(len(out["shift"]) - 1)
        out["ancestors"] += ancestor_mask(tree.parents).tolist() if tree is not None else []
    return out
