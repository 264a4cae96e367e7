"""What is left of a draft tree when its request has gone on: for late answers, and for replays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import ROOT, DraftTree, IntArray


def below(tree: DraftTree, path: Sequence[int] | IntArray) -> tuple[DraftTree | None, int]:
    """The subtree under the node that these tokens lead to from the root, and how many of them lie in the tree.

    None: the tokens leave the tree.
    """
    node, passed = ROOT, 0
    columns = (tree.parents.tolist(), tree.token_ids.tolist())
    children = {(parent, token): child for child, (parent, token) in enumerate(zip(*columns, strict=True))}
    for token in path:
        if (node, int(token)) not in children:
            return None, passed
        node, passed = children[node, int(token)], passed + 1
    if node == ROOT:
        return tree, passed
    place = {node: ROOT}
    for child, parent in enumerate(columns[0]):
        if parent in place:
            place[child] = len(place) - 1
    kept = np.asarray(list(place)[1:], dtype=np.int64)
    parents = np.asarray([place[columns[0][child]] for child in kept.tolist()], dtype=np.int32)
    return DraftTree(tree.token_ids[kept], parents, tree.log_q[kept], tree.source[kept]), passed
