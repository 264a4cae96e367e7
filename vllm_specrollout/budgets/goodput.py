"""The budget that is on by default: verify the nodes that yield most tokens per millisecond.

What belongs here: the order of the questions, and how likely a drafted node is accepted. What a step costs is in
step_cost.py, which nodes follow from both in `merge_select`. The rule is vLLM's own (adaptive_verification.py), and
goes back to SmartSpec's goodput: over all sets of nodes, the largest of

    (requests + sum of the probabilities that each node is reached) / (milliseconds of the step)

Sorted by probability, the nodes of all trees form one list in which every prefix is a set of subtrees. So one pass
finds the best set. The empty set is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_specrollout import _core
from vllm_specrollout.budgets.base import BaseBudget, bounded
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.trees.batch import Merged, Prices, merge_select
from vllm_specrollout.types import (
    SOURCES,
    TENTHS,
    DraftLimits,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    VerifyResult,
    empty_trees,
)

FIRST_PLAIN, RARER = 8, 8
"""Steps with drafts after which one goes without, to measure what drafts are compared with; then so many times as many,
each time. The first one comes soon, since the step at the very start may have been disturbed."""
_ANY = 1 << 30
_LEAST = 1e-9
PRIOR = 20.0
"""Observations that the drafter's own word counts for."""
MEMORY = 0.999
"""Weight left to an observation after each further one of its kind."""
NEW_WEIGHTS = 0.5
"""Weight left to all observations when the policy's weights change."""


class Acceptance:
    """Accepted over expected, for each drafter and each tenth of the probability that it gives."""

    def __init__(self) -> None:
        # [3, SOURCES, TENTHS] nodes whose parents were accepted; what drafters expected of them; those accepted.
        # Next to nothing, rather than nothing: a kind never seen is taken at its word.
        self._counts = np.full((3, SOURCES, TENTHS), _LEAST)
        self._version: int | None = None

    def observe(self, record: StepRecord) -> None:
        """Learn from what was verified, under the weights that were in force."""
        if record.batch is not None and record.batch.views:
            self._weights_are(record.batch.views[0].weights_version)
        if record.trees.num_nodes:
            self.count(record.trees, record.result)

    def count(self, trees: TreeBatch, result: VerifyResult) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Learn from what was verified; a node whose parent was rejected says nothing.

        Returns:
            [SOURCES] nodes that were verified, and those accepted.
        """
        columns = (trees.node_start, trees.parents, trees.log_q, trees.source)
        counts, verified, accepted = _core.tally(*columns, result.num_accepted, result.accepted)
        self._counts *= MEMORY ** counts[0]
        self._counts += counts
        return verified, accepted

    def calibration(self) -> npt.NDArray[np.float64]:
        """[SOURCES, TENTHS] factors on the drafters' probabilities; 1 where nothing is known.

        The prior weighs as observations of the kind's own mean probability, so that unlikely nodes are learned about as
        fast as likely ones.
        """
        reached, expected, accepted = self._counts
        prior = PRIOR * expected  # both sides times `reached`
        return (accepted * reached + prior) / (expected * reached + prior)

    def forget(self, first_source: int, num_sources: int) -> None:
        """Nothing is known of these sources any more."""
        self._counts[:, first_source : first_source + num_sources] = _LEAST

    def _weights_are(self, version: int) -> None:
        if self._version is not None and version != self._version:
            np.maximum(self._counts * NEW_WEIGHTS, _LEAST, out=self._counts)
        self._version = version


class GoodputBudget(BaseBudget):
    """Most tokens per millisecond, by what steps cost and by what was accepted."""

    backs_off = True

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        """Args:
        max_nodes, max_depth: the engine's limits for one request.
        """
        super().__init__(max_nodes, max_depth)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        # steps with drafts since the last one without, and after how many the next one goes without: the first does
        self._drafted, self._plain_after = 0, 0

    def limits(self, batch: RequestBatch) -> DraftLimits:
        token_ms = self.cost.plain_ms(batch.size) / batch.size if self.cost.is_known else 0.0
        return bounded(batch, self.max_nodes, self.max_depth, token_ms=token_ms)

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        plain_ms = self.cost.plain_ms(batch.size)
        if not any(proposal.num_nodes for proposal in proposals):
            return self._without("nothing proposed", batch, plain_ms, pays=False)
        if self._drafted >= self._plain_after:
            self._drafted, self._plain_after = 0, max(RARER * self._plain_after, FIRST_PLAIN)
            return self._without("plain, to know its cost", batch, plain_ms, pays=True)
        self._drafted += 1
        # before the first step is measured, its milliseconds and the drafters' cannot be compared
        asking = draft_ms if self.cost.is_known else 0.0
        # drafters have been asked already: where nothing pays, the best set is verified all the same, to learn from it
        merged = self._best(proposals, limits, batch, plain_ms, asking)
        pays = merged.gain > 1.0
        reason = "goodput" if pays else "drafts do not pay"
        return StepPlan(
            merged.trees, reason, pays=pays, reach=merged.reach, expected_ms=merged.ms + asking, plain_ms=plain_ms
        )

    def preview(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan | None:
        if not self.cost.is_known:
            return None
        plain_ms = self.cost.plain_ms(batch.size)
        if any(proposal.num_nodes for proposal in proposals):
            # where it does not pay it is verified all the same, as in `choose`
            merged = self._best(proposals, limits, batch, plain_ms, draft_ms)
            ms = merged.ms + draft_ms
            return StepPlan(merged.trees, "goodput", reach=merged.reach, expected_ms=ms, plain_ms=plain_ms)
        trees = empty_trees(batch.request_ids)
        return StepPlan(trees, "plain", pays=False, expected_ms=plain_ms + draft_ms, plain_ms=plain_ms)

    def _best(
        self,
        proposals: Sequence[TreeBatch],
        limits: DraftLimits,
        batch: RequestBatch,
        plain_ms: float,
        asking_ms: float,
    ) -> Merged:
        """The nodes with most tokens per millisecond; at least some, even where none pay."""
        num_nodes = sum(proposal.num_nodes for proposal in proposals)
        prices = Prices(plain_ms, self.cost.added_ms(batch.size, num_nodes), self.cost.branch_ms, asking_ms)
        calibration = self.acceptance.calibration()
        return merge_select(proposals, limits, calibration=calibration, prices=prices, least_nodes=_ANY)

    def observe(self, record: StepRecord) -> None:
        self.acceptance.observe(record)
        if record.timing is not None:
            self.cost.observe(record.timing)
            if record.timing.is_decode_only and not record.timing.nodes:
                self._drafted = 0

    def renewed(self, first_source: int, num_sources: int) -> None:
        self.acceptance.forget(first_source, num_sources)

    def seed(self, timings: Sequence[StepTiming]) -> None:
        self.cost.seed(timings)
        if any(timing.is_decode_only and not timing.nodes for timing in timings):
            self._plain_after = FIRST_PLAIN

    def _without(self, reason: str, batch: RequestBatch, plain_ms: float, *, pays: bool) -> StepPlan:
        trees = empty_trees(batch.request_ids)
        return StepPlan(trees, reason, pays=pays, expected_ms=plain_ms, plain_ms=plain_ms)
