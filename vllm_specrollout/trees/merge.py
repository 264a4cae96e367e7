"""Several drafters' trees for a batch become the trees that are verified, in one call of the C++ core.

What belongs here: the call and its carriers. What it computes is said, line by line, by the naive twin in
`tests/reference/merge_select.py`:

1. *Recalibrate*: each node's probability is the drafter's word, times what experience says of that drafter's words in
   that tenth (`calibration`), within [LEAST, MOST].
2. *Merge*: nodes with the same tokens from the root down become one. It has the largest of their probabilities, and
   the source and the word of the drafter that gave it. Siblings that add up to more than 1 are scaled down to it.
3. *Limit*: at most so many nodes and levels per request; a chain follows the likeliest child; with `width`, a level
   has at most so many nodes that are expanded, each into at most so many children (the beam of EAGLE-2).
4. *Select*: all that is left; or, with `prices`, the prefix of all requests' nodes, likeliest first, that yields most
   tokens per millisecond. Nothing is a prefix too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.types import DraftLimits, FloatArray, IntArray, TreeBatch

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


def merge_select(
    proposals: Sequence[TreeBatch],
    limits: DraftLimits,
    *,
    calibration: npt.NDArray[np.float64] | None = None,
    width: int = 0,
    prices: Prices | None = None,
    least_nodes: int = 0,
) -> Merged:
    """Merge, cut and choose; see the top of this file.

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
