"""Uniting the drafters' trees of a whole batch in one call of the C++ core.

Twin and specification: `step.unite_naively`.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout import _core
from vllm_specrollout.types import DraftTree


def unite(groups: Sequence[Sequence[DraftTree]], max_nodes: Sequence[int]) -> list[DraftTree]:
    """One tree per group: the best `max_nodes` nodes of its trees laid over each other.

    Args:
        groups: the trees of one request each, in the drafters' order.
        max_nodes: one number per group.

    Raises:
        ValueError: the arrays of a tree differ in length or are not what `DraftTree` says, or a parent comes after
            its child.
    """
    trees = [tree for group in groups for tree in group]
    node_start, token_ids, parents, log_q, source = _core.unite(
        [tree.token_ids for tree in trees],
        [tree.parents for tree in trees],
        [tree.log_q for tree in trees],
        [tree.source for tree in trees],
        [len(group) for group in groups],
        list(max_nodes),
    )
    ends = node_start.tolist()
    united = []
    for start, end in zip(ends, ends[1:], strict=False):
        own = slice(start, end)
        united.append(DraftTree(token_ids[own], parents[own], log_q[own], source[own]))
    return united
