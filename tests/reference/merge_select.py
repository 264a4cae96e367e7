"""The specification of `_core.merge_select`: see `vllm_specrollout/trees/batch.py` for what each step means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_specrollout.trees.batch import LEAST, MOST, Merged, Prices
from vllm_specrollout.types import ROOT, TENTHS, DraftLimits, TreeBatch


@dataclass
class Node:
    token: int
    parent: Node | None
    depth: int
    p: float = 0.0
    log_q: float = 0.0
    source: int = 0
    reach: float = 0.0
    children: list[Node] = field(default_factory=list)


def merge_select(
    proposals: Sequence[TreeBatch],
    limits: DraftLimits,
    *,
    calibration: np.ndarray | None = None,
    width: int = 0,
    prices: Prices | None = None,
    least_nodes: int = 0,
) -> Merged:
    trees, num_proposed = [], []
    for r in range(proposals[0].num_requests):
        root = merged(proposals, r, calibration)
        num_proposed.append(len(below(root)))
        bounds = (int(limits.max_nodes[r]), int(limits.max_depth[r]), bool(limits.is_chain[r]))
        trees.append(limited(root, *bounds, width))
    ms, gain, best = 0.0, 1.0, sum(map(len, trees))
    if prices is not None:
        trees, ms, gain, best = selected(trees, prices, least_nodes)
    return as_merged(proposals[0].request_ids, trees, num_proposed, ms, gain, best)


def merged(proposals: Sequence[TreeBatch], r: int, calibration: np.ndarray | None) -> Node:
    root = Node(-1, None, 0, p=1.0, reach=1.0)
    for proposal in proposals:
        own = slice(int(proposal.node_start[r]), int(proposal.node_start[r + 1]))
        placed: list[Node] = []
        columns = (proposal.token_ids, proposal.parents, proposal.log_q, proposal.source)
        for token, parent, log_q, source in zip(*(column[own].tolist() for column in columns), strict=True):
            above = root if parent == ROOT else placed[parent]
            q = math.exp(min(log_q, 0.0))
            factor = 1.0 if calibration is None else float(calibration[source, min(int(q * TENTHS), TENTHS - 1)])
            p = min(max(q * factor, LEAST), MOST)
            node = next((child for child in above.children if child.token == token), None)
            if node is None:
                node = Node(token, above, above.depth + 1)
                above.children.append(node)
            if p > node.p:
                node.p, node.log_q, node.source = p, log_q, source
            placed.append(node)
    for node in [root, *below(root)]:
        total = sum(child.p for child in node.children)
        for child in node.children:
            child.reach = node.reach * (child.p / total if total > 1.0 else child.p)
    return root


def below(root: Node) -> list[Node]:
    """All nodes under it, parents first."""
    nodes = list(root.children)
    for node in nodes:
        nodes += node.children
    return nodes


def likeliest_first(nodes: Sequence[Node]) -> list[Node]:
    """Of equals, the one that was placed earlier."""
    return sorted(nodes, key=lambda node: -node.reach)


def limited(root: Node, max_nodes: int, max_depth: int, is_chain: bool, width: int) -> list[Node]:
    """The nodes within the bounds, best first."""
    most_children = 1 if is_chain else width or 1 << 30
    level, allowed = [root], []
    while level and level[0].depth < max_depth:
        level = likeliest_first(level)[: width or None]
        level = [child for node in level for child in likeliest_first(node.children)[:most_children]]
        allowed += level
    taken: list[Node] = []
    reachable = [node for node in allowed if node.parent is root]
    while reachable and len(taken) < max_nodes:
        # the most reachable; of equals, the one whose parent was taken earlier, then the sibling that stands earlier
        best = max(reachable, key=lambda node: node.reach)
        reachable.remove(best)
        taken.append(best)
        reachable += [node for node in allowed if node.parent is best]
    return taken


def selected(trees: list[list[Node]], prices: Prices, least_nodes: int) -> tuple[list[list[Node]], float, float, int]:
    batch = len(trees)
    everything = likeliest_first([node for tree in trees for node in tree])
    tokens, paths, with_child = float(batch), 0, set()
    best, best_rate, best_ms = 0, -1.0, 0.0
    for count, node in enumerate(everything, 1):
        # the first node of a request opens its first path, a node's first child goes on with it: both cost nothing more
        if id(node.parent) in with_child:
            paths += 1
        with_child.add(id(node.parent))
        tokens += node.reach
        ms = prices.plain + prices.nodes[count] + prices.branch * paths
        if tokens / ms > best_rate:
            best, best_rate, best_ms, best_tokens = count, tokens / ms, ms, tokens
    plain_rate = batch / prices.plain
    if not best:
        return trees, prices.plain, 0.0, 0
    does_pay = best_rate > plain_rate
    gain = best_tokens / (best_ms + prices.draft) / plain_rate
    count = best if does_pay else min(least_nodes, best)
    kept = {id(node) for node in everything[:count]}
    chosen = [[node for node in tree if id(node) in kept] for tree in trees]
    if not does_pay:
        best_ms = prices.plain + cost_of(chosen, prices)
    return chosen, best_ms, gain, best


def cost_of(trees: list[list[Node]], prices: Prices) -> float:
    nodes = sum(map(len, trees))
    paths = sum(len(tree) - len({id(node.parent) for node in tree}) for tree in trees)
    return float(prices.nodes[nodes]) + prices.branch * paths if nodes else 0.0


def as_merged(request_ids: Sequence[str], trees: list[list[Node]], num_proposed: list[int], *rest: float) -> Merged:
    start = np.cumsum([0, *map(len, trees)], dtype=np.int32)
    rows = []
    for tree in trees:
        place = {id(node): i for i, node in enumerate(tree)}
        rows += [(n.token, place.get(id(n.parent), ROOT), n.log_q, n.source, n.depth, n.reach) for n in tree]
    kinds = (np.int32, np.int32, np.float32, np.int32, np.int32, np.float32)
    *columns, reach = (np.asarray([row[i] for row in rows], kind) for i, kind in enumerate(kinds))
    ms, gain, best = rest
    batch = TreeBatch(request_ids, start, *columns)
    return Merged(batch, reach, np.asarray(num_proposed, dtype=np.int32), ms, gain, int(best))
