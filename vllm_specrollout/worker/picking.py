"""The budget's two loops over all nodes of a batch, in C++. Twin of policies/pick.py; imports no engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout import _core
from vllm_specrollout.policies.pick import CERTAIN, UNLIKELY, Kernels, Pick, PickRequest, Reached
from vllm_specrollout.types import EMPTY_TREE, DraftTree, Feedback


def pick(trees: Sequence[DraftTree], request: PickRequest) -> Pick:
    """As `policies.pick.pick`."""
    prices = request.prices
    node_start, token_ids, parents, log_q, source, tokens, gain, cost, net = _core.pick(
        [tree.token_ids for tree in trees],
        [tree.parents for tree in trees],
        [tree.log_q for tree in trees],
        [tree.source for tree in trees],
        request.by_bucket,
        request.by_depth,
        request.by_request,
        request.worth,
        request.is_chain,
        request.max_nodes,
        request.max_depth,
        prices.rows,
        prices.draft,
        prices.tree,
        prices.branch,
        UNLIKELY,
        CERTAIN,
        request.least_net,
        request.probes,
    )
    ends = node_start.tolist()
    chosen = [
        DraftTree(token_ids[a:b], parents[a:b], log_q[a:b], source[a:b]) if b > a else EMPTY_TREE
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    return Pick(chosen, tokens, gain, cost, net)


def reached(feedback: Sequence[Feedback]) -> Reached:
    """As `policies.pick.reached`."""
    return Reached(
        *_core.reached(
            [item.parents for item in feedback],
            [item.log_q for item in feedback],
            [item.source for item in feedback],
            [np.ascontiguousarray(item.accepted_nodes, np.int32) for item in feedback],
        )
    )


CORE = Kernels(pick, reached)
