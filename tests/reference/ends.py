"""What is left of a draft once a request's end tokens are known: the specification of `_core.open_nodes`.

A node with an end token saves no step, since that token is sampled in its parent's row, and what hangs below it is
behind the answer's end. All other nodes stay, in their order: so every prefix is the best tree of its size still.
"""

from __future__ import annotations

from collections.abc import Collection

from vllm_specrollout.types import ROOT, DraftTree


def open_nodes(tree: DraftTree, ends: Collection[int]) -> list[int]:
    """The nodes that stay."""

    def is_open(node: int) -> bool:
        return node == ROOT or (int(tree.token_ids[node]) not in ends and is_open(int(tree.parents[node])))

    return [node for node in range(tree.size) if is_open(node)]
