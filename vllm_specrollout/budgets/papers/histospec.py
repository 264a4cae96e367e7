"""RhymeRL's draft window per answer. What belongs here: windows, and when a batch is too large for them.

Source: RhymeRL, section 5.4 (HistoSpec). Its drafter (5.3) is the `history` drafter; see `config/budgets.py`.
"""

from __future__ import annotations

import numpy as np

from vllm_specrollout.budgets.papers.plans import PaperBudget, Rate, chain_limits, keep_running
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    RequestBatch,
    StepRecord,
)

START, STEP, CAP = 2, 2, 32
"""Tokens of a new answer's window and of one after a rejection; what a draft accepted whole adds; the largest."""
PROBE_EVERY = 32
"""Steps without drafts after which one drafts: acceptance changes, also while nobody looks."""


class HistoSpecBudget(PaperBudget):
    """Each answer has a window: 2 tokens at first, 2 more after each draft accepted whole, 2 again after a rejection.

    Chains only, as in the paper. It drafts in batches up to the largest that gains at the present acceptance. The paper
    takes that from profiling beforehand; here the profile is the cost model, learned while the engine runs.

    Args:
        max_nodes, max_depth: the engine's limits; they cap the window too.
    """

    def __init__(self, max_nodes: int, max_depth: int, *, cost: StepCost | None = None) -> None:
        super().__init__(max_nodes, max_depth, cost)
        self.cap = min(CAP, max_nodes, max_depth)
        self.windows: dict[str, int] = {}
        # tokens per draft, as if one draft had been accepted whole
        self._drafted, self._accepted = Rate(1.0, START), Rate(1.0, START)
        self._off = 0  # steps since the last one with drafts

    def pays(self, num_requests: int) -> bool:
        """Whether a step with typical drafts yields more tokens per millisecond than one without."""
        if not num_requests:
            return True
        with_drafts = self.cost.predict(num_requests, round(num_requests * self._drafted.mean))
        return (1.0 + self._accepted.mean) * self.cost.plain_ms(num_requests) >= with_drafts

    def steps_off(self, num_requests: int) -> int:
        return int(self._off < PROBE_EVERY and not self.pays(num_requests))

    def limits(self, batch: RequestBatch) -> DraftLimits:
        keep_running(self.windows, batch)
        windows = [self.windows.get(name, START) for name in batch.request_ids]
        sizes = np.minimum(np.asarray(windows, dtype=np.int32), self.cap)
        reason = "window" if self.pays(batch.size) else "probe"
        self._off = 0
        return chain_limits(batch, sizes, reason)

    def observe(self, record: StepRecord) -> None:
        """Move the windows of the requests that had drafts."""
        super().observe(record)
        self._off = 0 if record.trees.num_nodes else self._off + 1
        sizes, accepted = record.trees.sizes, record.result.num_accepted
        drafting = np.flatnonzero(sizes)
        self._drafted.add(len(drafting), int(sizes.sum()))
        self._accepted.add(len(drafting), int(accepted.sum()))
        for i in drafting.tolist():
            name, is_whole = record.trees.request_ids[i], accepted[i] == sizes[i]
            grown = min(self.windows.get(name, START) + STEP, self.cap)
            self.windows[name] = grown if is_whole else START

    def finish(self, ending: Answer) -> None:
        self.windows.pop(ending.request_id, None)
