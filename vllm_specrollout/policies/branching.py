"""Trees of bounded branching, as systems with a top-k draft them. Pure.

What belongs here: what the budgets that set depth, top-k and size (TLT, FastGRPO) share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_specrollout.trees.build import select
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import EMPTY_TREE, ROOT, Decision, DraftTree, Shape


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """How a request's candidates become a tree: TLT's (Draft_Depth, topK, Tokens_to_Verify)."""

    # most nodes of a tree; the root, which vLLM computes anyway, not counted
    nodes: int
    # most levels
    depth: int
    # most children of one node
    top_k: int


def with_top_k(tree: DraftTree, top_k: int) -> DraftTree:
    """The tree without any node's children beyond its `top_k` most probable ones, and without what hangs on those.

    Args:
        tree: parents first and siblings most probable first, as every draft tree is.
        top_k: most children of one node, at least 1.
    """
    children: dict[int, int] = {}
    kept: list[int] = []
    is_kept = {ROOT}
    for node, parent in enumerate(tree.parents.tolist()):
        count = children.get(parent, 0)
        if parent not in is_kept or count == top_k:
            continue
        children[parent] = count + 1
        is_kept.add(node)
        kept.append(node)
    return tree if len(kept) == tree.size else select(tree, kept)


def within(trees: Sequence[DraftTree], decisions: Sequence[Decision], top_k: int) -> list[DraftTree]:
    """Each tree within its decision, with at most `top_k` children per node."""
    return [
        prune(with_top_k(tree, top_k), decision) if tree.size and decision.shape is not Shape.OFF else EMPTY_TREE
        for tree, decision in zip(trees, decisions, strict=True)
    ]
