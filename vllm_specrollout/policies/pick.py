"""Which nodes of all requests' trees are verified, when all compete for one budget.

What belongs here: the choice, from beliefs and prices; where those come from is not known here. These functions are
plain loops, the specification; engines pass in a twin in C++ (csrc/core/pick.h), property-tested to choose the same.

A node gains what its request's tokens are worth times the probability that the target walks down to it, so no node
gains more than its parent. It costs a row of the forward pass, the next row costing what the cost model says of so many
rows. A node that opens a further path, or is the first of its request, costs something besides, which the nodes below
it may help to pay. Nodes are ranked by gain per cost, none above its parent; of all prefixes of that order the one that
gains most over its cost is verified. The empty one is a choice too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout.trees.build import select
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, Feedback

Array = npt.NDArray[np.float64]

SOURCES = 16
"""Drafters that are told apart."""
BUCKETS = 10
"""Equally wide ranges of probability."""
DEPTHS = (0, 1, 2, 3, 4, 5, 7, 10, 16)
"""Where ranges of depth begin."""
UNLIKELY, CERTAIN = 1e-6, 0.995
"""No node is believed less, or more, likely to be accepted than this."""
_FREE_ROW = 1e-9  # milliseconds that a row is taken to cost at the least where nodes are ranked
_HELPERS = 3  # nodes below one that opens a path whose gain may help to pay for it


@dataclass(frozen=True, slots=True)
class Prices:
    """What verifying costs, in milliseconds."""

    # [M + 1] what 0, 1, ... M more rows add to the step; never falls
    rows: Array
    # any drafts at all
    draft: float = 0.0
    # a request with drafts
    tree: float = 0.0
    # a path beyond a request's first
    branch: float = 0.0


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What a choice is made from."""

    # [SOURCES, BUCKETS] and [SOURCES, len(DEPTHS)] factors that correct the drafters' probabilities
    by_bucket: Array
    by_depth: Array
    # [R] factor of each request
    by_request: Array
    # [R] milliseconds that one more token of each request saves
    worth: Array
    # [R] whether only the first child of a node may be verified
    is_chain: npt.NDArray[np.bool_]
    # [R] nodes from here on, and deeper ones, are not verified
    max_nodes: npt.NDArray[np.int64]
    max_depth: npt.NDArray[np.int64]
    prices: Prices
    # milliseconds; if what pays saves no more than this, only the likeliest `probes` nodes are verified
    least_net: float = 0.0
    probes: int = 0


@dataclass(frozen=True, slots=True)
class Pick:
    """What is verified, and what that is expected to come to."""

    # [R]
    trees: list[DraftTree]
    # accepted nodes
    tokens: float
    # milliseconds, of the trees above
    gain: float
    cost: float
    # milliseconds that the best choice saves, whether or not it was taken; 0.0: nothing pays
    net: float

    @property
    def num_nodes(self) -> int:
        """Nodes of all requests."""
        return sum(tree.size for tree in self.trees)


@dataclass(frozen=True, slots=True)
class Reached:
    """The N nodes that the target put to the test: those whose parent was accepted, or is the root."""

    # [N] node -> index into the feedback
    owner: npt.NDArray[np.int64]
    # [N] flat indices into tables [SOURCES, BUCKETS] and [SOURCES, len(DEPTHS)]
    bucket: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    # [N] probability as the drafter had it
    q: Array
    # [N] 1.0 if accepted, else 0.0
    accepted: Array


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two loops over all nodes of a batch."""

    pick: Callable[[Sequence[DraftTree], PickRequest], Pick]
    reached: Callable[[Sequence[Feedback]], Reached]


@dataclass(slots=True)
class _Node:
    """A candidate."""

    tree: int
    index: int
    parent: _Node | None
    is_first: bool
    depth: int
    reach: float = 0.0
    gain: float = 0.0
    extra: float = 0.0
    value: float = 0.0
    first_child: _Node | None = None


def pick(trees: Sequence[DraftTree], request: PickRequest) -> Pick:
    """Choose from the candidates; see the top of this file.

    Args:
        trees: [R] candidates. In each, the first child of a node is its likeliest.
        request: prices for at least as many rows as there are nodes.
    """
    nodes = _nodes(trees, request)
    rows = request.prices.rows
    ranked: list[_Node] = []
    if nodes:
        # not what the next row costs: where that is nothing, every node would be worth infinitely much, and all alike
        _value(nodes, max(float(rows[len(nodes)] - rows[0]) / len(nodes), _FREE_ROW))
        cheapest = float(np.diff(rows[: len(nodes) + 1]).min())
        # single precision, as the twin sorts; of equals the earlier node comes first, and so parents before children
        ranked = sorted((n for n in nodes if n.gain > cheapest), key=lambda n: -np.float32(n.value))
    kept = ranked[: _best_prefix(ranked, request.prices)]
    found = _settle(trees, kept, request.prices)
    # a branch was ranked as if a likelier sibling were there: where it is not, the reckoning may come out below zero
    if kept and found.net > max(request.least_net, 0.0):
        return found
    probed = _settle(trees, _likeliest(nodes, request.probes), request.prices)
    return Pick(probed.trees, probed.tokens, probed.gain, probed.cost, max(found.net, 0.0))


def _nodes(trees: Sequence[DraftTree], request: PickRequest) -> list[_Node]:
    nodes: list[_Node] = []
    for t, tree in enumerate(trees):
        own: list[_Node] = []
        columns = (tree.parents.tolist(), tree.log_q.tolist(), tree.source.tolist())
        has_root_child = False
        for index, (parent_index, log_q, source) in enumerate(zip(*columns, strict=True)):
            parent = None if parent_index == ROOT else own[parent_index]
            is_first = not has_root_child if parent is None else parent.first_child is None
            node = _Node(t, index, parent, is_first, 1 if parent is None else parent.depth + 1)
            if parent is None:
                has_root_child = True
            elif is_first:
                parent.first_child = node
            q = math.exp(log_q)
            corrected = q * (
                request.by_bucket[source, probability_bucket(q)] * request.by_depth[source, depth_range(node.depth)]
            )
            p = min(max(float(corrected) * float(request.by_request[t]), UNLIKELY), CERTAIN)
            is_beyond = index >= request.max_nodes[t] or node.depth > request.max_depth[t]
            if is_beyond or (request.is_chain[t] and not is_first):
                p = 0.0
            node.reach = p if parent is None else parent.reach * p
            node.gain = node.reach * float(request.worth[t])
            prices = request.prices
            node.extra = prices.branch if not is_first else prices.tree if parent is None else 0.0
            own.append(node)
        nodes += own
    return nodes


def _value(nodes: Sequence[_Node], row: float) -> None:
    """Gain per cost. Nodes with an extra cost share it with the chain below them; none is valued above its parent."""
    for node in nodes:
        best = node.gain / (row + node.extra)
        gain, cost, below = node.gain, row + node.extra, node.first_child
        for _ in range(_HELPERS if node.extra > 0.0 else 0):
            if below is None:
                break
            gain, cost, below = gain + below.gain, cost + row + below.extra, below.first_child
            best = max(best, gain / cost)
        node.value = best if node.parent is None else min(best, node.parent.value)


def _best_prefix(ranked: Sequence[_Node], prices: Prices) -> int:
    """How many nodes, in their order, gain most over what they cost; 0 if none do."""
    best, count, total = -math.inf, 0, 0.0
    for i, node in enumerate(ranked):
        total += node.gain - node.extra
        net = total - float(prices.rows[i + 1])
        if net > best:
            best, count = net, i + 1
    return count if best > prices.draft else 0


def _likeliest(nodes: Sequence[_Node], count: int) -> list[_Node]:
    """The likeliest nodes of all, parents before children."""
    chosen: list[_Node] = []
    taken: set[int] = set()
    for _ in range(count):
        reachable = [
            n for n in nodes if id(n) not in taken and n.reach > 0.0 and (n.parent is None or id(n.parent) in taken)
        ]
        if not reachable:
            break
        best = max(reachable, key=lambda n: n.reach)
        taken.add(id(best))
        chosen.append(best)
    return chosen


def _settle(trees: Sequence[DraftTree], kept: Sequence[_Node], prices: Prices) -> Pick:
    """The kept nodes as trees, and what they come to."""
    indices: list[list[int]] = [[] for _ in trees]
    for node in kept:
        indices[node.tree].append(node.index)
    chosen = [select(tree, sorted(own)) if own else EMPTY_TREE for tree, own in zip(trees, indices, strict=True)]
    gain = sum(node.gain for node in kept)
    cost = cost_of(chosen, prices)
    return Pick(chosen, sum(node.reach for node in kept), gain, cost, gain - cost)


def cost_of(trees: Sequence[DraftTree], prices: Prices) -> float:
    """Milliseconds that verifying these trees adds to a step."""
    sizes = [tree.size for tree in trees]
    if not any(sizes):
        return 0.0
    branches = sum(tree.size - len(set(tree.parents.tolist())) for tree in trees)
    num_trees = sum(size > 0 for size in sizes)
    return float(prices.rows[sum(sizes)]) + prices.draft + prices.tree * num_trees + prices.branch * branches


def reached(feedback: Sequence[Feedback]) -> Reached:
    """The nodes put to the test, over all requests."""
    owners: list[int] = []
    cells: list[tuple[int, int]] = []
    words: list[tuple[float, float]] = []
    for owner, item in enumerate(feedback):
        accepted = set(item.accepted_nodes.tolist())
        depths: list[int] = []
        rows = zip(item.parents.tolist(), item.log_q.tolist(), item.source.tolist(), strict=True)
        for node, (parent, log_q, source) in enumerate(rows):
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            if parent != ROOT and parent not in accepted:
                continue
            q = math.exp(log_q)
            owners.append(owner)
            cells.append((source * BUCKETS + probability_bucket(q), source * len(DEPTHS) + depth_range(depths[node])))
            words.append((q, float(node in accepted)))
    bucket, depth = np.asarray(cells, dtype=np.int64).reshape(-1, 2).T
    q_, got = np.asarray(words, dtype=np.float64).reshape(-1, 2).T
    return Reached(np.asarray(owners, dtype=np.int64), bucket, depth, q_, got)


def probability_bucket(q: float) -> int:
    """The range of probability that q lies in."""
    return min(int(q * BUCKETS), BUCKETS - 1)


def depth_range(depth: int) -> int:
    """The range of depth."""
    return sum(depth >= start for start in DEPTHS) - 1


NAIVE = Kernels(pick, reached)
