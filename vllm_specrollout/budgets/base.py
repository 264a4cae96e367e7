"""Budgets, which choose how much is drafted in the next step: their one Protocol, and pauses.

What belongs here: what every budget answers. A budget is asked for limits before the drafters propose, and chooses
what is worth verifying afterwards. It never learns who watches it, and it keeps no clock: pauses are the speculator's,
by the one rule that is here; whom an expensive drafter is asked for is in worth.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
)

FOR_GOOD = 1 << 30
"""Steps; more than any engine runs."""
PATIENCE = 4
"""Asked steps in a row that may fail to pay before the first pause."""
FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Steps without drafts; each further pause is twice as long, and one try lies between two."""
SHARE = 0.01
"""Of the time, or of the steps with drafts: what may be lost to know what drafts are worth."""


class Budget(Protocol):
    """Decides how much to draft. Pure: the same calls give the same answers."""

    backs_off: bool
    """Whether asking may be left for a while where nothing is proposed; what does not pay is said by each plan."""
    why_off: str
    """Why steps go without drafts where `steps_off` says so."""

    def steps_off(self, num_requests: int) -> int:
        """How many of the coming steps go without drafts whichever requests are in them; 0: look at the next one's.

        Asked once per engine step, before its requests are looked at, which costs time at large batches.
        """

    def limits(self, batch: RequestBatch) -> DraftLimits:
        """How much drafters are asked for."""

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        """What of the proposals is verified.

        Args:
            proposals: [P] one per drafter that was asked, each over all requests of the batch.
            limits: what `limits` answered for this batch.
            draft_ms: milliseconds that asking drafters takes in such steps.
        """

    def preview(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan | None:
        """The best of these proposals, or a plain step where there are none; None: it has no idea.

        Args:
            proposals, limits, batch, draft_ms: as in `choose`; a question only, nothing is planned.
        """

    def observe(self, record: StepRecord) -> None:
        """A step is over."""

    def finish(self, ending: Answer) -> None:
        """A request is over."""

    def renewed(self, first_source: int, num_sources: int) -> None:
        """A drafter has other weights from now on: what was learned of its sources holds, but for little."""

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from steps that were measured earlier on such an engine."""


class BaseBudget:
    """What most budgets answer alike: they ask in every step, as the published systems do."""

    backs_off = False
    why_off = "off"

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        """Args:
        max_nodes, max_depth: the engine's limits for one request.
        """
        self.max_nodes = max_nodes
        self.max_depth = max_depth

    def steps_off(self, num_requests: int) -> int:
        return 0

    def limits(self, batch: RequestBatch) -> DraftLimits:
        return bounded(batch, self.max_nodes, self.max_depth)

    def preview(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan | None:
        return None

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def finish(self, ending: Answer) -> None:
        """Nothing is kept per request."""

    def renewed(self, first_source: int, num_sources: int) -> None:
        """Nothing is kept per drafter."""

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Nothing to start from."""


def bounded(
    batch: RequestBatch, max_nodes: int, max_depth: int, *, is_chain: bool = False, token_ms: float = 0.0
) -> DraftLimits:
    """The same limits for all requests, within what each of them allows."""
    depth = np.minimum(batch.max_depth, np.int32(max_depth))
    chain_only = np.ones_like(batch.is_chain) if is_chain else batch.is_chain
    # a request without levels has no nodes either; a chain has one on each level
    nodes = np.minimum(batch.max_nodes, np.int32(max_nodes if max_depth > 0 else 0))
    if chain_only.any():
        np.minimum(nodes, depth, out=nodes, where=chain_only)
    return DraftLimits(nodes, depth, chain_only, token_ms=token_ms)


def sound_limits(limits: DraftLimits, count: int) -> DraftLimits:
    """Raises: they are not one for each request, or of other types: drafters would fail at what the budget did."""
    columns = [(limits.max_nodes, "i"), (limits.max_depth, "i"), (limits.is_chain, "b")]
    if limits.drafters is not None:
        columns.append((limits.drafters, "u"))
    for column, kind in columns:
        if column.shape != (count,):
            raise ValueError(f"limits of shape {column.shape} for {count} requests")
        if column.dtype.kind != kind:
            raise TypeError(f"limits of type {column.dtype}")
    if not math.isfinite(limits.token_ms):
        raise ValueError(f"a token takes {limits.token_ms} ms")
    return limits


def sound_plan(plan: StepPlan) -> StepPlan:
    """Raises: what a plan says of its trees is not of them, or no number. The trees themselves are looked at apart."""
    if plan.reach is not None and plan.reach.shape != (plan.trees.num_nodes,):
        raise ValueError(f"a plan of {plan.trees.num_nodes} nodes that tells of {len(plan.reach)}")
    if math.isnan(plan.expected_ms) or math.isnan(plan.plain_ms):
        raise ValueError("a plan whose times are no numbers")
    if not isinstance(plan.pays, bool | np.bool_):
        raise TypeError(f"a plan that pays {plan.pays!r}")
    return plan


class Backoff:
    """Pauses drafting: after some steps in a row that did not pay, for ever longer, until one pays.

    What was found holds for about as many requests: with more than twice as many, or less than half, it is asked anew.
    A rollout that begins would otherwise wait for the end of a pause from the last one's tail.
    """

    def __init__(self) -> None:
        self._failed = 0
        self._pause = FIRST_PAUSE
        # the first step that may be asked again
        self._until = 0
        # requests of the step that was asked last
        self._size = 0

    def steps_left(self, step: int, num_requests: int) -> int:
        """How many steps from this one on go without drafts."""
        return 0 if is_other(num_requests, self._size) else max(self._until - step, 0)

    def asked(self, step: int, num_requests: int, paid: bool) -> None:
        """Drafters were asked in this step.

        Args:
            paid: whether that is expected to pay, the asking counted.
        """
        if paid or is_other(num_requests, self._size):
            self._pause = FIRST_PAUSE
        self._failed, self._size = 0 if paid else self._failed + 1, num_requests
        if self._failed >= PATIENCE:
            self._until = step + 1 + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


def is_other(num_requests: int, size: int) -> bool:
    """Whether what was found with a batch of this size says nothing of so many requests."""
    return not size <= 2 * num_requests <= 4 * size
