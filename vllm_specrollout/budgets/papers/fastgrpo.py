"""FastGRPO's drafting by concurrency: trees as large as the batch leaves room below the engine's knee.

Source: FastGRPO, section 4.1, equations 1 to 3, and Appendix B for C_peak.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from vllm_specrollout.budgets.papers.knee import Knee, find_knee
from vllm_specrollout.budgets.papers.plans import PaperBudget, Strategy, everything_within, no_drafts, tree_limits
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.config.budgets import FastGrpoOptions
from vllm_specrollout.types import DraftLimits, RequestBatch, StepPlan, StepRecord, StepTiming, TreeBatch

K_MAX = 8
"""Most nodes of a level that are expanded, and most children of each; the text gives no number."""
GROWTH = 0.1
"""Share by which a step's time has grown "obviously" (appendix B), where time against rows is a straight line."""
_PER_ROWS = 16  # times remembered of each row count
_REFIT = (16, 256)  # steps between two fits of the knee: at first, and once many are known


class FastGrpoBudget(PaperBudget):
    """N_verify = C_peak / B rows for each of B requests, the root's own among them.

        K = min(N_verify - 1, K_max)               EAGLE-2's beam
        L = min(ceil(log2(N_verify / alpha)), L_max)   levels; alpha, which the text does not give, is 1 here

    C_peak is the knee of step time against rows. Appendix B sweeps the rows before training. Here the steps that the
    engine runs anyway are the sweep, and a saved profile is one (`seed`): as long as time has not begun to grow over
    the rows measured, twice as many are tried. What drafting and branches took is taken off.

    Args:
        max_nodes, max_depth: the engine's limits, the latter L_max.
        cost: what branches cost.
    """

    def __init__(
        self, max_nodes: int, max_depth: int, options: FastGrpoOptions | None = None, *, cost: StepCost | None = None
    ) -> None:
        super().__init__(max_nodes, max_depth, cost)
        self.options = options or FastGrpoOptions()
        self.c_peak = float(self.options.c_peak)
        self.knee: Knee | None = None
        # rows -> milliseconds of their last steps
        self._ms: dict[int, deque[float]] = {}
        self._seen, self._next_fit = 0, 1

    def strategy(self, num_requests: int) -> Strategy | None:
        """Equations 1 to 3; None where nothing is left to draft."""
        n_verify = int(self.c_peak / max(num_requests, 1))
        nodes = min(n_verify - 1, self.max_nodes)
        if nodes <= 0:
            return None
        depth = min(math.ceil(math.log2(n_verify)), self.max_depth)
        return Strategy(nodes, depth, min(n_verify - 1, K_MAX))

    def steps_off(self, num_requests: int) -> int:
        return int(self.strategy(num_requests) is None)

    def limits(self, batch: RequestBatch) -> DraftLimits:
        strategy = self.strategy(batch.size)
        if strategy is None:
            return no_drafts(batch, "batch at the knee")
        return tree_limits(batch, strategy, "below the knee")

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        strategy = self.strategy(batch.size)
        return everything_within(proposals, limits, batch, width=strategy.top_k if strategy else 0)

    def observe(self, record: StepRecord) -> None:
        step = record.timing
        if step is None:
            return
        self.cost.observe(step)
        if self._note(step) and self._seen >= self._next_fit:
            self._measure()

    def seed(self, timings: Sequence[StepTiming]) -> None:
        super().seed(timings)
        if sum(map(self._note, timings)):
            self._measure()

    def _note(self, step: StepTiming) -> bool:
        is_usable = step.is_decode_only and 0.0 < step.step_ms < math.inf and math.isfinite(step.ask_ms)
        if self.options.c_peak or not is_usable or step.rows < 1:
            return False
        besides = step.ask_ms + self.cost.branch_ms * step.branches
        # an estimate must not eat the measurement
        ms = max(step.step_ms - max(besides, 0.0), 0.5 * step.step_ms)
        self._ms.setdefault(_rounded(step.rows), deque(maxlen=_PER_ROWS)).append(ms)
        self._seen += 1
        return True

    def _measure(self) -> None:
        least, most = _REFIT
        self._next_fit = self._seen + min(max(least, self._seen // 4), most)
        points = [(rows, ms) for rows, times in self._ms.items() for ms in times]
        self.knee = find_knee([rows for rows, _ in points], [ms for _, ms in points], GROWTH)
        self.c_peak = 2.0 * max(self._ms) if self.knee is None else self.knee.rows


def _rounded(rows: int) -> int:
    """Row counts in eight steps per power of two, so that there are few of them to fit; never fewer than there were."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step
