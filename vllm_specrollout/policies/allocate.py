"""Which nodes of all requests' trees are verified, when all compete for one budget.

What belongs here: the choice, from gains and costs in milliseconds. Where those come from is not known here.

A node gains its worth times the probability that the target walks down to it; so no node gains more than its parent,
and taking nodes in the order of their gains never takes a child before its parent. It costs a row of the forward pass,
the next row costing what the cost model says of so many rows. A node that opens a path, or is the first of its request,
costs a little more, which the best nodes below it may help to pay. Of all prefixes of that order the one with the
largest gain less cost is verified; the empty one too is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specrollout.policies.forest import Forest

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

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
class Allocation:
    """What is verified, and what that comes to."""

    # [N] nodes to keep
    keep: Mask
    # milliseconds
    gain: float
    cost: float

    @property
    def net(self) -> float:
        return self.gain - self.cost


def cost_of(forest: Forest, keep: Mask, prices: Prices) -> float:
    """Milliseconds that verifying these nodes adds to a step: the specification of what is minimised."""
    nodes = int(keep.sum())
    if not nodes:
        return 0.0
    n = forest.size
    key = np.where(forest.parent < n, forest.parent, n + forest.owner)[keep]
    trees = len(np.unique(forest.owner[keep]))
    branches = nodes - len(np.unique(key))
    return float(prices.rows[nodes]) + prices.draft + prices.tree * trees + prices.branch * branches


def allocate(forest: Forest, gain: Array, prices: Prices) -> Allocation:
    """The nodes to verify.

    Args:
        forest: the candidates; in each tree the first child of a node is its likeliest.
        gain: [N] milliseconds each node is expected to save; no node's exceeds its parent's.
        prices: with at least as many rows as the forest has nodes.
    """
    n = forest.size
    nothing = Allocation(np.zeros(n, dtype=np.bool_), 0.0, 0.0)
    if not n:
        return nothing
    cheapest = float(np.diff(prices.rows[: n + 1]).min())
    extra = np.zeros(n)
    if prices.branch > 0.0 or prices.tree > 0.0:
        is_first = forest.is_first_child()
        extra = np.where(is_first, 0.0, prices.branch) + np.where(is_first & (forest.parent == n), prices.tree, 0.0)
    # what is worth less than the cheapest row never pays
    worthy = gain > cheapest
    if not worthy.any():
        return nothing
    order, added = _in_order(forest, gain, extra, worthy, float(prices.rows[1] - prices.rows[0]))
    net = np.cumsum(gain[order]) - np.cumsum(added) - prices.rows[1 : len(order) + 1]
    best = int(np.argmax(net))
    if net[best] <= prices.draft:
        return nothing
    keep = nothing.keep.copy()
    keep[order[: best + 1]] = True
    total = float(gain[keep].sum())
    return Allocation(keep, total, cost_of(forest, keep, prices))


def _in_order(
    forest: Forest, gain: Array, extra: Array, worthy: Mask, row: float
) -> tuple[npt.NDArray[np.int64], Array]:
    """Worthy nodes by gain per cost, parents first, and what each adds to the cost besides its row."""
    value = gain / row
    openers = np.flatnonzero((extra > 0.0) & worthy)
    if len(openers):
        value = _with_help(forest, gain, extra, value, openers, row)
    chosen = np.flatnonzero(worthy)
    # stable: nodes of equal value stay in their tree's order, in which parents come first
    order = chosen[np.argsort(-value[chosen], kind="stable")]
    return order, extra[order]


def _with_help(
    forest: Forest, gain: Array, extra: Array, value: Array, openers: npt.NDArray[np.int64], row: float
) -> Array:
    """[N] gain per cost, where nodes with an extra cost share it with the chain below them; still no child before its
    parent."""
    n = forest.size
    child = np.full(n + 1, n, dtype=np.int64)
    is_inner = forest.parent < n
    nodes = np.flatnonzero(is_inner)[::-1]
    child[forest.parent[nodes]] = nodes  # of several children the first one stays
    gains, extras = np.append(gain, 0.0), np.append(extra, 0.0)
    chain = [openers]
    sums, costs = gains[openers], row + extras[openers]
    best = sums / costs
    for _ in range(_HELPERS):
        chain.append(child[chain[-1]])
        sums, costs = sums + gains[chain[-1]], costs + row + extras[chain[-1]]
        best = np.maximum(best, sums / costs)
    value = np.append(value, 0.0)
    value[openers] = best
    # a child may not go before its parent
    value = value[:n]
    while True:
        above = np.append(value, np.inf)[forest.parent]
        if (value <= above).all():
            return value
        value = np.minimum(value, above)
