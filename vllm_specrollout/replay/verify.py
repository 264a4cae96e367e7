"""What the target makes of a batch's trees when the answers are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import ROOT, IntArray, TreeBatch, VerifyResult


def verified(trees: TreeBatch, truths: Sequence[IntArray]) -> VerifyResult:
    """How far each tree agrees with the truth.

    Args:
        truths: [R] each request's tokens from here on.
    """
    parents, token_ids = trees.parents.tolist(), trees.token_ids.tolist()
    starts = trees.node_start.tolist()
    num_accepted = np.zeros(trees.num_requests, dtype=np.int32)
    accepted: list[int] = []
    for request in np.flatnonzero(trees.sizes).tolist():
        first, last = starts[request], starts[request + 1]
        truth = truths[request][: last - first].tolist()
        node, depth = ROOT, 0
        # parents come before children, and no two siblings have one token
        for i in range(first, last):
            if depth < len(truth) and parents[i] == node and token_ids[i] == truth[depth]:
                node = i - first
                depth += 1
                accepted.append(node)
        num_accepted[request] = depth
    return VerifyResult(num_accepted, np.asarray(accepted, dtype=np.int32))


def without(trees: TreeBatch, dropped: Sequence[bool]) -> TreeBatch:
    """The same requests, some of them without their drafts.

    Args:
        dropped: [R] True: this request's nodes go.
    """
    kept = ~np.asarray(dropped)
    sizes = np.where(kept, trees.sizes, 0)
    rows = np.repeat(kept, trees.sizes)
    node_start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    columns = (trees.token_ids, trees.parents, trees.log_q, trees.source, trees.depth)
    token_ids, parents, log_q, source, depth = (column[rows] for column in columns)
    return TreeBatch(trees.request_ids, node_start, token_ids, parents, log_q, source, depth)
