"""Cutting a draft tree down to what a decision allows and what pays.

May enter: the carriers, `trees.build`. May not: torch, vLLM, clocks, randomness.
"""

from __future__ import annotations

import math

from vllm_specrollout.trees.build import cumulative_log_q, select
from vllm_specrollout.types import EMPTY_TREE, ROOT, Decision, DraftTree, Shape

# float32 log_q of a node that lies exactly on the threshold may fall short of it by this much
_ROUNDING = 1e-6


def prune(tree: DraftTree, decision: Decision) -> DraftTree:
    """Keep the nodes that the decision allows and that are worth their cost; every prefix stays the best of its size.

    A node's marginal gain is the expected number of tokens it adds: the probability p that the target walks all the
    way down to it (no token is gained unless all its ancestors are accepted too). Its marginal cost is one verified
    row. `decision.min_probability` is the gain that pays for one row, so the node is kept while p reaches it.

    A node that opens another root-to-leaf path costs more where every path is verified on its own copy of the KV cache
    blocks it writes (path expansion): `decision.path_cost` further rows. Its gain must then pay for 1 + path_cost rows.
    The first child of a node only prolongs a path, so it opens none; every later sibling opens one. The first is the
    most probable one, hence it is the one kept if any is.

    Args:
        tree: best first (`trees.build.order`).
        decision: the bounds; `Shape.CHAIN` follows the best child from the root down.
    """
    if decision.shape is Shape.OFF or min(decision.max_nodes, decision.max_depth, tree.size) <= 0:
        return EMPTY_TREE
    threshold = _log_threshold(decision.min_probability)
    path_threshold = _log_threshold(decision.min_probability * (1.0 + decision.path_cost))
    is_chain = decision.shape is Shape.CHAIN
    total = cumulative_log_q(tree)
    # depth of each kept node, and which kept nodes have a kept child already
    depth = {ROOT: 0}
    with_child: set[int] = set()
    kept: list[int] = []
    for node, parent in enumerate(tree.parents.tolist()):
        opens_path = parent in with_child
        if parent not in depth or depth[parent] == decision.max_depth or (opens_path and is_chain):
            continue
        if total[node] < (path_threshold if opens_path else threshold):
            continue
        depth[node] = depth[parent] + 1
        with_child.add(parent)
        kept.append(node)
        if len(kept) == decision.max_nodes:
            break
    return tree if len(kept) == tree.size else select(tree, kept)


def _log_threshold(probability: float) -> float:
    return math.log(probability) - _ROUNDING if probability > 0.0 else -math.inf
