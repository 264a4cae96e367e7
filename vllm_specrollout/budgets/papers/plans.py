"""Limits and plans that the published systems' budgets have in common, and how often tokens of chains are accepted."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.budgets.base import BaseBudget, bounded
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import (
    DraftLimits,
    IntArray,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    empty_trees,
)

_NOTHING = "nothing to draft"
_FEW = 64  # requests that may be remembered in vain
_MEMORY = 0.98
"""Weight left to a step's drafts after each further step with drafts: about the last fifty steps count."""
_SURE = 2.0
"""Standard errors that a rate must be off by: luck alone is so far below in one of 44 cases."""


class PaperBudget(BaseBudget):
    """Verifies all within its limits, and knows what steps cost.

    Args:
        max_nodes, max_depth: the engine's limits.
        cost: what steps cost; None: nothing is known of it yet.
    """

    def __init__(self, max_nodes: int, max_depth: int, cost: StepCost | None) -> None:
        super().__init__(max_nodes, max_depth)
        self.cost = cost or StepCost()

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        return everything_within(proposals, limits, batch)

    def observe(self, record: StepRecord) -> None:
        if record.timing is not None:
            self.cost.observe(record.timing)

    def seed(self, timings: Sequence[StepTiming]) -> None:
        self.cost.seed(timings)


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


@dataclass(slots=True)
class Rate:
    """So much per case, lately: accepted tokens per token that the target reached, or tokens per draft.

    All cases of a step fade together, so the order of requests within a step does not matter.
    """

    cases: float = 0.0
    total: float = 0.0

    def add(self, cases: int, total: int) -> None:
        """One more step; without any case nothing changes."""
        if cases:
            self.cases = _MEMORY * self.cases + cases
            self.total = _MEMORY * self.total + total

    @property
    def mean(self) -> float:
        """Per case; 0.0 before there was one."""
        return self.total / self.cases if self.cases else 0.0

    def is_surely_below(self, p: float) -> bool:
        """Whether this is below the probability `p` by more than luck with so few cases explains."""
        return p - self.mean > _SURE * math.sqrt(p * (1.0 - p) / self.cases) if self.cases else False


def tried_tokens(sizes: IntArray, num_accepted: IntArray) -> IntArray:
    """[R] tokens of each chain that the target reached: the accepted ones, and the first that was rejected."""
    return np.minimum(num_accepted + 1, sizes).astype(np.int32)


def tokens_per_step(p: float, size: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Tokens that a request gains from a step with a chain of `size` tokens, each accepted with p in its turn.

    The accepted ones and one of the target's own: the sum of p^i for i from 0 to `size`.
    """
    sizes = np.asarray(size, dtype=np.float64)
    return sizes + 1.0 if p >= 1.0 else (1.0 - p ** (sizes + 1.0)) / (1.0 - p)
