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
from vllm_specrollout.budgets.base import SHARE, BaseBudget, bounded
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.trees.batch import Prices, merge_select
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

COLD, SPELL = 3, 6
"""A spell: so many steps in a row leave drafters alone, to measure what drafts are compared with. Its first ones do not
count. They are up to a half dearer than plain decoding's own, since caches and threads have just worked for drafts."""
LEAST, CREDIT = 8, 2.0
"""Steps with drafts between two spells, at least. Spells may lose `SHARE` of the steps with drafts, and a few steps
more: where drafts seem to gain little, there is little to lose, and a wrong measure costs most."""
TO_KNOW = "plain, to know its cost"
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
            self.weights_are(record.batch.views[0].weights_version)
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

    def renew(self, first_source: int, num_sources: int) -> None:
        """These sources say other things from now on: what they said counts for as much as their own word does."""
        own = self._counts[:, first_source : first_source + num_sources]
        own *= PRIOR / np.maximum(own[0], PRIOR)

    def weights_are(self, version: int) -> None:
        """What is counted from now on is of these; of others, half of what was counted is left."""
        if self._version is not None and version != self._version:
            np.maximum(self._counts * NEW_WEIGHTS, _LEAST, out=self._counts)
        self._version = version


class GoodputBudget(BaseBudget):
    """Most tokens per millisecond, by what steps cost and by what was accepted."""

    backs_off = True
    why_off = TO_KNOW

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        """Args:
        max_nodes, max_depth: the engine's limits for one request.
        """
        super().__init__(max_nodes, max_depth)
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self._has_begun = False
        # steps with drafts since the last spell, those left of one, those without drafts in a row; those they may lose
        self._drafted, self._spell, self._plain, self._credit = 0, 0, 0, CREDIT

    def steps_off(self, num_requests: int) -> int:
        return self._spell

    def limits(self, batch: RequestBatch) -> DraftLimits:
        step_ms = self.cost.plain_ms(batch.size) if self.cost.is_known else 0.0
        return bounded(batch, self.max_nodes, self.max_depth, token_ms=step_ms / batch.size)

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        if not any(proposal.num_nodes for proposal in proposals):
            return self._without("nothing proposed", batch, pays=False)
        if not self._has_begun:
            self._has_begun = True
            return self._without(TO_KNOW, batch, pays=True)
        # before the first step is measured, its milliseconds and the drafters' cannot be compared
        plan = self._best(proposals, limits, batch, draft_ms if self.cost.is_known else 0.0)
        gain = (1.0 + plan.expected_tokens / batch.size) * plan.plain_ms / max(plan.expected_ms, _LEAST)
        self._drafted, self._credit, loses = self._drafted + 1, self._credit + SHARE, SPELL * max(gain - 1.0, 0.0)
        if self._drafted >= LEAST and loses <= self._credit:
            self._drafted, self._spell, self._credit = 0, SPELL, self._credit - loses
        return plan

    def preview(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan | None:
        if not self.cost.is_known:
            return None
        if any(proposal.num_nodes for proposal in proposals):
            return self._best(proposals, limits, batch, draft_ms)
        return self._without("plain", batch, pays=False, asking_ms=draft_ms)

    def _best(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, asking_ms: float
    ) -> StepPlan:
        """The nodes with most tokens per millisecond. Where nothing pays, they are verified all the same, to learn from
        them: drafters have been asked already."""
        plain_ms, num_nodes = self.cost.plain_ms(batch.size), sum(proposal.num_nodes for proposal in proposals)
        prices = Prices(plain_ms, self.cost.added_ms(batch.size, num_nodes), self.cost.branch_ms, asking_ms)
        merged = merge_select(
            proposals, limits, calibration=self.acceptance.calibration(), prices=prices, least_nodes=_ANY
        )
        pays, ms = merged.gain > 1.0, merged.ms + asking_ms
        why = "goodput" if pays else "drafts do not pay"
        return StepPlan(merged.trees, why, pays=pays, reach=merged.reach, expected_ms=ms, plain_ms=plain_ms)

    def observe(self, record: StepRecord) -> None:
        self.acceptance.observe(record)
        self._plain = 0 if record.trees.num_nodes else self._plain + 1
        self._spell = max(self._spell - (self._plain > 0), 0)
        if record.timing is not None and (not 0 < self._plain <= COLD or not self.cost.is_known):
            self.cost.observe(record.timing)

    def renewed(self, first_source: int, num_sources: int) -> None:
        self.acceptance.renew(first_source, num_sources)

    def seed(self, timings: Sequence[StepTiming]) -> None:
        self.cost.seed(timings)
        self._has_begun |= any(timing.is_decode_only and not timing.nodes for timing in timings)

    def _without(self, reason: str, batch: RequestBatch, *, pays: bool, asking_ms: float = 0.0) -> StepPlan:
        plain_ms, trees = self.cost.plain_ms(batch.size), empty_trees(batch.request_ids)
        return StepPlan(trees, reason, pays=pays, expected_ms=plain_ms + asking_ms, plain_ms=plain_ms)
