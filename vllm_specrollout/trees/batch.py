"""Operations on the trees of a whole batch: merge and select, reorder, cut, compare.

May enter: the carriers, numpy, our C++ core. May not: torch, vLLM, clocks, randomness. Nothing here loops over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.types import (
    EMPTY_TREE,
    ROOT,
    BoolArray,
    DraftLimits,
    DraftTree,
    FloatArray,
    IntArray,
    RequestBatch,
    TreeBatch,
    empty_trees,
)

LEAST, MOST = 1e-6, 0.995
"""No node is believed less, or more, likely to be accepted than this."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What verifying costs, in milliseconds."""

    # the step without drafts
    plain: float
    # [M + 1] float64: what 0, 1, ... M draft nodes add to it; never falls
    nodes: npt.NDArray[np.float64]
    # a root-to-leaf path beyond a request's first
    branch: float = 0.0
    # of asking drafters, which has happened already: it decides whether asking again pays, not what is verified
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class Merged:
    """What is verified, and what was there to choose from."""

    trees: TreeBatch
    # [N] float32: probability that the target walks down to each node of `trees`
    reach: FloatArray
    # [R] int32: merged nodes of each request, before any was left out
    num_proposed: IntArray
    # milliseconds expected of the step with `trees`; 0.0 without prices
    ms: float
    # whether drafting beats plain decoding with the asking counted: tokens per millisecond over plain decoding's;
    # 1.0 without prices
    gain: float
    # nodes in the best non-empty selection, whether or not it pays; all without prices
    best_nodes: int


def proposed(
    request_ids: Sequence[str],
    node_start: IntArray,
    token_ids: IntArray,
    parents: IntArray,
    log_q: FloatArray,
    source: int,
) -> TreeBatch:
    """One drafter's trees; columns as in `TreeBatch`.

    Raises:
        ValueError: a parent does not come before its child, or `node_start` does not cover the nodes.
    """
    depth = _core.depths(node_start, parents, len(request_ids))
    sources = np.full(len(token_ids), source, dtype=np.int32)
    return TreeBatch(request_ids, node_start, token_ids, parents, log_q, sources, depth)


def merge_select(
    proposals: Sequence[TreeBatch],
    limits: DraftLimits,
    *,
    calibration: npt.NDArray[np.float64] | None = None,
    width: int = 0,
    prices: Prices | None = None,
    least_nodes: int = 0,
) -> Merged:
    """Several drafters' trees become the trees that are verified, in one call of the C++ core.

    What it computes is said, line by line, by the naive twin in `tests/reference/merge_select.py`:

    1. *Recalibrate*: each node's probability is the drafter's word, times what experience says of that drafter's words
       in that tenth (`calibration`), within [LEAST, MOST].
    2. *Merge*: nodes with the same tokens from the root down become one. It has the largest of their probabilities, and
       the source and the word of the drafter that gave it. Siblings that add up to more than 1 are scaled down to it.
    3. *Limit*: at most so many nodes and levels per request; a chain follows the likeliest child; with `width`, a level
       has at most so many nodes that are expanded, each into at most so many children (the beam of EAGLE-2).
    4. *Select*: all that is left; or, with `prices`, the prefix of all requests' nodes, likeliest first, that yields
       most tokens per millisecond. Nothing is a prefix too.

    Args:
        proposals: at least one; all over the same requests, in the same order.
        limits: [R] most nodes and levels; a request with 0 nodes gets none.
        calibration: [SOURCES, TENTHS] factors; None: drafters are taken at their word.
        width: most nodes of a level that are expanded, and most children of each; 0: no bound.
        prices: None: everything within the limits is verified.
        least_nodes: with prices: where nothing pays, so many of the likeliest nodes are taken all the same, to learn.

    Raises:
        ValueError: arrays of other lengths than the requests ask for.
    """
    first = proposals[0]
    columns = [(p.node_start, p.token_ids, p.parents, p.log_q, p.source) for p in proposals]
    node_start, token_ids, parents, log_q, source, depth, reach, num_proposed, ms, gain, best = _core.merge_select(
        columns,
        limits.max_nodes,
        limits.max_depth,
        limits.is_chain,
        calibration,
        width,
        None if prices is None else (prices.plain, prices.nodes, prices.branch, prices.draft),
        least_nodes,
    )
    trees = TreeBatch(first.request_ids, node_start, token_ids, parents, log_q, source, depth)
    return Merged(trees, reach, num_proposed, ms, gain, best)


def without_ends(trees: TreeBatch, batch: RequestBatch) -> TreeBatch:
    """The trees over the batch, without the nodes that have an end token of their request, and all that hangs there.

    Such a node saves no step: the token that ends an answer is sampled in its parent's row, and nothing follows it. So
    an accepted path never holds an end, and a request's state behind its last token is that of plain decoding.
    """
    if not len(batch.end_ids):
        return trees
    columns = (trees.node_start, trees.parents, trees.token_ids)
    is_open = _core.open_nodes(*columns, batch.end_start, batch.end_ids)
    return trees if is_open.all() else _kept(trees, is_open)


def take(trees: TreeBatch, request_ids: Sequence[str], index: npt.NDArray[Any], counts: IntArray) -> TreeBatch:
    """Trees of some requests, in another order and cut to their first nodes.

    Args:
        request_ids: [K] what the requests of the result are called.
        index: [K] request of the result -> request of `trees`; anything where its count is 0.
        counts: [K] nodes that are kept, at most as many as there are; a tree's first nodes are its best ones.
    """
    node_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=node_start[1:])
    is_same = node_start[-1] == trees.num_nodes and np.array_equal(node_start, trees.node_start)
    if is_same and np.array_equal(index[counts > 0], np.flatnonzero(counts)):
        return _named(trees, request_ids)
    rows = np.arange(node_start[-1]) + np.repeat(trees.node_start[index] - node_start[:-1], counts)
    return TreeBatch(
        request_ids,
        node_start,
        trees.token_ids[rows],
        trees.parents[rows],
        trees.log_q[rows],
        trees.source[rows],
        trees.depth[rows],
    )


def over(trees: TreeBatch, request_ids: Sequence[str]) -> TreeBatch:
    """The trees of these requests, in this order; a request without one has no nodes."""
    if not trees.num_nodes:
        return empty_trees(request_ids)
    place = {name: i for i, name in enumerate(trees.request_ids)}
    index = np.fromiter((place.get(name, -1) for name in request_ids), np.int64, len(request_ids))
    return take(trees, request_ids, index, np.where(index < 0, 0, trees.sizes[index]))


def cut(trees: TreeBatch, counts: IntArray) -> TreeBatch:
    """The first `counts` [R] nodes of each tree, or all that there are."""
    if not (trees.sizes > counts).any():
        return trees
    kept = np.minimum(trees.sizes, counts).astype(np.int32)
    return take(trees, trees.request_ids, np.arange(len(kept)), kept)


def with_branches(trees: TreeBatch) -> BoolArray:
    """[R] whether some node hangs on another one than that before it."""
    # a chain's node has as many nodes before it as there are levels above it
    local = np.arange(trees.num_nodes) - np.repeat(trees.node_start[:-1], trees.sizes)
    return _any_by_request(trees, trees.parents != local - 1)


def first_paths(trees: TreeBatch) -> IntArray:
    """[R, most levels] tokens of each tree's path that begins at its first node and goes on with first children; -1
    behind its end."""
    count = trees.num_nodes
    owner = np.repeat(np.arange(trees.num_requests), trees.sizes)
    above = np.where(trees.parents != ROOT, trees.parents + trees.node_start[owner], count + owner)
    # the first child of each node, then of each root; the last slot is for those who have none
    child = np.full(count + trees.num_requests + 1, -1, dtype=np.int64)
    child[above[::-1]] = np.arange(count)[::-1]
    tokens = np.append(trees.token_ids, -1).astype(np.int32)
    node, levels = count + np.arange(trees.num_requests), list[IntArray]()
    for _ in range(int(trees.depth.max(initial=0))):
        node = child[node]
        levels.append(tokens[node])
    return np.stack(levels, axis=1) if levels else np.zeros((trees.num_requests, 0), dtype=np.int32)


def num_branches(trees: TreeBatch) -> int:
    """Root-to-leaf paths beyond the first of each tree, all requests together."""
    with_child = np.zeros(trees.num_nodes, dtype=np.bool_)
    below = trees.parents != ROOT
    with_child[(trees.parents + np.repeat(trees.node_start[:-1], trees.sizes))[below]] = True
    return int(trees.num_nodes - np.count_nonzero(with_child) - np.count_nonzero(trees.sizes))


def as_chains(trees: TreeBatch, where: BoolArray) -> TreeBatch:
    """The trees with only their best path kept where `where` [R] says so.

    The first child of a node is its best one, so the best path is what follows first children from the root down.
    """
    starts = np.repeat(trees.node_start[:-1], trees.sizes)
    above = trees.parents + starts
    # node -> whether it is its parent's first child; a root's parent is told apart by its request
    keys = np.where(trees.parents == ROOT, -1 - np.repeat(np.arange(trees.num_requests), trees.sizes), above)
    _, first = np.unique(keys, return_index=True)
    is_kept = np.zeros(trees.num_nodes, dtype=np.bool_)
    is_kept[first] = True
    for depth in range(2, int(trees.depth.max(initial=0)) + 1):
        level = trees.depth == depth
        is_kept[level] &= is_kept[above[level]]
    is_kept |= ~np.repeat(where, trees.sizes)
    return _kept(trees, is_kept)


def chains(request_ids: Sequence[str], token_ids: Sequence[Sequence[int]], source: int = 0) -> TreeBatch:
    """Drafts without branches, whose tokens are all that is known of them: their probabilities say nothing."""
    counts = np.fromiter(map(len, token_ids), dtype=np.int32, count=len(token_ids))
    node_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=node_start[1:])
    total = int(node_start[-1])
    depth = (np.arange(total) - np.repeat(node_start[:-1], counts) + 1).astype(np.int32)
    tokens = np.fromiter((token for own in token_ids for token in own), dtype=np.int32, count=total)
    return TreeBatch(
        request_ids,
        node_start,
        tokens,
        depth - 2,
        np.zeros(total, dtype=np.float32),
        np.full(total, source, dtype=np.int32),
        depth,
    )


def batch_of(request_ids: Sequence[str], trees: Sequence[DraftTree]) -> TreeBatch:
    """The trees of a batch, [R] each, behind one another; each node keeps its source."""
    node_start = np.zeros(len(trees) + 1, dtype=np.int32)
    np.cumsum([tree.size for tree in trees], out=node_start[1:])
    token_ids, parents, log_q, source = (
        np.concatenate([getattr(EMPTY_TREE, name), *(getattr(tree, name) for tree in trees)])
        for name in ("token_ids", "parents", "log_q", "source")
    )
    return replace(proposed(request_ids, node_start, token_ids, parents, log_q, 0), source=source)


def joined(trees: TreeBatch, others: TreeBatch, where: BoolArray) -> TreeBatch:
    """`trees`, but those of `others` where `where` [R] says so; both over the same requests."""
    both = TreeBatch(
        [*trees.request_ids, *others.request_ids],
        np.concatenate([trees.node_start, others.node_start[1:] + trees.num_nodes]),
        *(np.concatenate([getattr(trees, name), getattr(others, name)]) for name in _COLUMNS),
    )
    index = np.arange(trees.num_requests) + np.where(where, trees.num_requests, 0)
    return take(both, trees.request_ids, index, both.sizes[index])


def on_host(trees: TreeBatch) -> TreeBatch:
    """The trees with their columns in host memory, wherever the drafter left them."""
    if isinstance(trees.token_ids, np.ndarray):
        return trees
    return TreeBatch(trees.request_ids, *(_host(getattr(trees, name)) for name in ("node_start", *_COLUMNS)))


def token_lists(trees: TreeBatch) -> list[list[int]]:
    """[R] each request's tokens as plain numbers, as vLLM's scheduler takes them."""
    tokens, starts = trees.token_ids.tolist(), trees.node_start.tolist()
    return [tokens[a:b] for a, b in zip(starts, starts[1:], strict=False)]


_COLUMNS = ("token_ids", "parents", "log_q", "source", "depth")


def _host(column: Any) -> Any:
    moved = column.cpu() if hasattr(column, "cpu") else column
    return np.asarray(moved)


def _named(trees: TreeBatch, request_ids: Sequence[str]) -> TreeBatch:
    if request_ids is trees.request_ids:
        return trees
    return TreeBatch(request_ids, trees.node_start, *(getattr(trees, name) for name in _COLUMNS))


def _any_by_request(trees: TreeBatch, is_so: BoolArray) -> BoolArray:
    sums = np.concatenate([[0], np.cumsum(is_so)])
    return sums[trees.node_start[1:]] > sums[trees.node_start[:-1]]


def _kept(trees: TreeBatch, is_kept: BoolArray) -> TreeBatch:
    """Parents of kept nodes are kept."""
    places = np.concatenate([[0], np.cumsum(is_kept, dtype=np.int32)])
    node_start = places[trees.node_start].astype(np.int32)
    kept = np.flatnonzero(is_kept)
    sizes = np.diff(node_start)
    above = trees.parents + np.repeat(trees.node_start[:-1], trees.sizes)
    parents = np.where(trees.parents[kept] == ROOT, ROOT, places[above[kept]] - np.repeat(node_start[:-1], sizes))
    return TreeBatch(
        trees.request_ids,
        node_start,
        trees.token_ids[kept],
        parents.astype(np.int32),
        trees.log_q[kept],
        trees.source[kept],
        trees.depth[kept],
    )
