"""FastGRPO's drafting by concurrency: trees as large as the batch leaves room below the engine's knee.

Source: FastGRPO, section 4.1, equations 1 to 3, and Appendix B for C_peak.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from vllm_specrollout.policies.branching import Strategy, within
from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.policies.knee import Knee, find_knee
from vllm_specrollout.types import (
    EMPTY_TREE,
    Choice,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
    StepTiming,
)

_PER_ROWS = 16  # times remembered of each row count
_REFIT_EVERY = 64  # steps at first; once there are 1024, four times as many
_GROWTH = 1.25  # where no knee was found, this much beyond what was measured is tried


class FastGrpoBudget:
    """N_verify = C_peak / B rows for each of B requests, the root's own among them.

        K = min(N_verify - 1, K_max)               children of a node
        L = min(ceil(log2(N_verify / alpha)), L_max)   levels

    C_peak is the knee of step time against rows. Steps are what the engine runs anyway, so no sweep is needed; a saved
    profile is one (`seed`). Milliseconds that the cost model puts down to drafting and branches are taken off, as the
    paper times the forward pass alone. Until a knee is known, `start` stands for it; where time does not grow yet, the
    knee lies further out, and a little more than the largest step measured is tried.

    Args:
        max_nodes, max_depth: the engine's limits, the latter L_max.
        alpha: quality of the drafter, smaller for a better one; the paper gives no value.
        k_max: K_max.
        start: C_peak before anything was measured, in rows.
    """

    def __init__(
        self, max_nodes: int, max_depth: int, *, alpha: float = 1.0, k_max: int = 8, start: float = 32.0
    ) -> None:
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.alpha, self.k_max = alpha, k_max
        self.cost = StepCost()
        self.c_peak = start
        self.knee: Knee | None = None
        self._ms: dict[int, deque[float]] = {}
        self._seen = 0
        self._strategy: Strategy | None = None
        self._choice: Choice | None = None

    def strategy(self, batch: int) -> Strategy | None:
        """Equations 1 to 3; None where nothing is left to draft."""
        n_verify = int(self.c_peak / max(batch, 1))
        nodes = min(n_verify - 1, self.max_nodes)
        if nodes <= 0 or n_verify <= self.alpha:
            return None
        depth = min(math.ceil(math.log2(n_verify / self.alpha)), self.max_depth)
        return Strategy(nodes, depth, min(nodes, self.k_max))

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        strategy = self._strategy = self.strategy(len(views))
        if strategy is None:
            self._choice = Choice(False, "batch at the knee", 0)
            return [Decision(0, 0, Shape.OFF, reason="fastgrpo: batch at the knee")] * len(views)
        decisions = [may_draft(view, strategy.nodes, strategy.depth, "fastgrpo: below the knee") for view in views]
        if not any(decision.max_nodes for decision in decisions):
            self._choice = Choice(False, "nothing to draft", 0)
        return decisions

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        if self._strategy is None:
            return [EMPTY_TREE] * len(trees)
        chosen = within(trees, decisions, self._strategy.top_k)
        self._choice = Choice(True, "below the knee", sum(tree.size for tree in chosen))
        return chosen

    def explain(self) -> Choice | None:
        return self._choice

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        if timing is None:
            return
        self.cost.observe(timing)
        if self._note(timing) and self._seen % (_REFIT_EVERY if self._seen <= 1024 else 4 * _REFIT_EVERY) == 0:
            self._measure()

    def seed(self, timings: Sequence[StepTiming]) -> None:
        """Start from a saved profile."""
        self.cost.seed(timings)
        if sum(map(self._note, timings)):
            self._measure()

    def finish(self, ending: Ending) -> None:
        """Nothing is kept per request."""

    def _note(self, timing: StepTiming) -> bool:
        if not timing.is_decode_only or timing.step_ms <= 0.0 or timing.rows < 1:
            return False
        rows, nodes, batch = timing.rows, timing.nodes, timing.batch
        with_drafts = self.cost.predict(rows, nodes, timing.branches, batch=batch, trees=timing.trees)
        drafting_ms = with_drafts - self.cost.predict(rows, batch=batch) if nodes else 0.0
        # an estimate must not eat the measurement
        ms = max(timing.step_ms - max(drafting_ms, 0.0), 0.5 * timing.step_ms)
        self._ms.setdefault(_rounded(rows), deque(maxlen=_PER_ROWS)).append(ms)
        self._seen += 1
        return True

    def _measure(self) -> None:
        points = [(rows, ms) for rows, times in self._ms.items() for ms in times]
        self.knee = find_knee([rows for rows, _ in points], [ms for _, ms in points])
        if self.knee is not None:
            self.c_peak = self.knee.rows
        elif len(self._ms) >= 3:
            # time is level so far; less than what was tried before is no news
            self.c_peak = max(self.c_peak, _GROWTH * max(self._ms))


def _rounded(rows: int) -> int:
    """Row counts in eight steps per power of two, so that there are few of them to fit."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return (rows + step // 2) // step * step
