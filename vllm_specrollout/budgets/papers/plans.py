"""What the published systems' budgets answer alike. What belongs here: limits and plans, not how much is drafted."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_specrollout.budgets.base import bounded
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import DraftLimits, IntArray, RequestBatch, StepPlan, TreeBatch, empty_trees

_NOTHING = "nothing to draft"
_FEW = 64  # requests that may be remembered in vain


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """How a request's candidates become a tree: TLT's (Tokens_to_Verify, Draft_Depth, topK)."""

    # most nodes of a tree; the root, which vLLM computes anyway, not counted
    nodes: int
    # most levels
    depth: int
    # EAGLE-2's beam: most nodes of a level that are expanded, and most children of each
    top_k: int


def tree_limits(batch: RequestBatch, strategy: Strategy, reason: str) -> DraftLimits:
    """The same tree for all requests, within what each of them allows."""
    limits = bounded(batch, strategy.nodes, strategy.depth)
    return replace(limits, reason=reason if limits.wants_any else _NOTHING)


def chain_limits(batch: RequestBatch, sizes: IntArray, reason: str) -> DraftLimits:
    """A chain for each request, within what it allows.

    Args:
        sizes: [R] int32, most tokens of each request's chain.
    """
    nodes = np.minimum(np.minimum(batch.max_nodes, batch.max_depth), sizes).astype(np.int32)
    return DraftLimits(nodes, nodes, np.ones_like(batch.is_chain), reason=reason if nodes.any() else _NOTHING)


def no_drafts(batch: RequestBatch, reason: str) -> DraftLimits:
    """Nothing is wanted, and why."""
    nothing = np.zeros(batch.size, dtype=np.int32)
    return DraftLimits(nothing, nothing, np.ones_like(batch.is_chain), reason=reason)


def keep_running(known: MutableMapping[str, Any], batch: RequestBatch) -> None:
    """Forget what is known of requests that are not in the batch, once that is most of it.

    Whoever is preempted and aborted then, or ends while a step of its is on its way, is not told of a last time.
    """
    if len(known) > 2 * batch.size + _FEW:
        running = set(batch.request_ids)
        for name in [name for name in known if name not in running]:
            del known[name]


def everything_within(
    proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, *, width: int = 0
) -> StepPlan:
    """Verify all that the limits leave, for their reason. The papers know no pauses, so asking always pays.

    Args:
        width: as in `merge_select`.
    """
    if not limits.wants_any or not proposals:
        return StepPlan(empty_trees(batch.request_ids), limits.reason, is_on=False)
    return StepPlan(merge_select(proposals, limits, width=width).trees, limits.reason)
