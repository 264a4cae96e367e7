"""SpecActor's draft window for the whole batch, and own windows for requests that are accepted less than most.

Source: SpecActor, section 4.1: the model of TGS, Algorithm 1 (as far as it chooses w) and Algorithm 2. This is the
coupled form, where drafting and verification take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_specrollout.budgets.papers.plans import (
    PaperBudget,
    Rate,
    chain_limits,
    everything_within,
    keep_running,
    tokens_per_step,
    tried_tokens,
)
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.config.budgets import SpecActorOptions
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    RequestBatch,
    StepPlan,
    StepRecord,
    TreeBatch,
)

REPLAN = 1000
"""Tokens generated between two plans (Algorithm 2)."""
_PRIOR_P, _PRIOR_TOKENS = 0.7, 8.0
"""The batch's acceptance before anything was seen, and how many tokens that is worth."""


class SpecActorBudget(PaperBudget):
    """Chains of the window w that maximises TGS = b * tau_w / (w * D + V).

    The paper's P(a, w) is p^a (1 - p) for a < w and p^w for a = w. Its tau_w for decoupled execution counts (a + 1) / 2
    for a partly accepted window, since the window drafted meanwhile is lost, and w for a whole one. In coupled
    execution nothing is drafted meanwhile, and each verification yields its a accepted tokens and one of the target's
    own: the sum of P(a, w) (a + 1), which is (1 - p^(w+1)) / (1 - p).

    V is the cost model's time of a step with b requests and b * w draft tokens; p is the batch's acceptance per token,
    measured. Windows are planned at the first step and again after so many generated tokens: one for the batch, and an
    own one for each request whose acceptance is below the batch's by more than its error (Algorithm 2). The paper plans
    that one for b = 1, as its low requests have verifiers that others have freed. Here they share a forward pass, so
    their tokens cost what more rows add to the batch's. As in the paper a window is 1 at least.

    Args:
        max_nodes, max_depth: the engine's limits; they cap the window.
    """

    def __init__(
        self, max_nodes: int, max_depth: int, options: SpecActorOptions | None = None, *, cost: StepCost | None = None
    ) -> None:
        super().__init__(max_nodes, max_depth, cost)
        self.options = options or SpecActorOptions()
        self.window = 1
        # request -> its own window
        self.own: dict[str, int] = {}
        self.acceptance = Rate(_PRIOR_TOKENS, _PRIOR_P * _PRIOR_TOKENS)
        self.requests: dict[str, Rate] = {}
        self._tokens = REPLAN  # generated since the last plan

    def best_window(self, num_requests: int) -> int:
        """The w, 1 to the engine's limit, with the largest TGS; the smallest of several."""
        windows = np.arange(1, min(self.max_nodes, self.max_depth) + 1)
        added = self.cost.added_ms(num_requests, num_requests * int(windows[-1]))[num_requests * windows]
        ms = windows * self.options.draft_ms + self.cost.plain_ms(num_requests) + added
        return int(windows[np.argmax(tokens_per_step(self.acceptance.mean, windows) / ms)])

    def own_window(self, p: float, num_requests: int) -> int:
        """The w with the largest TGS of the whole batch, if this request alone leaves the batch's window.

        Alone in its batch, a request gets what Algorithm 2 gives it with b = 1.
        """
        windows = np.arange(1, min(self.max_nodes, self.max_depth) + 1)
        others = num_requests - 1
        nodes = others * self.window + windows
        longest = np.maximum(windows, self.window) if others else windows
        tokens = others * tokens_per_step(self.acceptance.mean, self.window) + tokens_per_step(p, windows)
        added = self.cost.added_ms(num_requests, int(nodes[-1]))[nodes]
        ms = longest * self.options.draft_ms + self.cost.plain_ms(num_requests) + added
        return int(windows[np.argmax(tokens / ms)])

    def replan(self, batch: RequestBatch) -> None:
        """Set the windows anew for these running requests."""
        self._tokens = 0
        self.window = self.best_window(batch.size)
        known = [(name, self.requests[name]) for name in batch.request_ids if name in self.requests]
        self.own = {
            name: self.own_window(rate.mean, batch.size)
            for name, rate in known
            if rate.is_surely_below(self.acceptance.mean)
        }

    def limits(self, batch: RequestBatch) -> DraftLimits:
        keep_running(self.requests, batch)
        if self._tokens >= REPLAN and batch.size:
            self.replan(batch)
        sizes = np.asarray([self.own.get(name, self.window) for name in batch.request_ids], dtype=np.int32)
        return chain_limits(batch, sizes, "own windows" if self.own else "window")

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        plan = everything_within(proposals, limits, batch)
        return replace(
            plan,
            reach=np.power(self.acceptance.mean, plan.trees.depth, dtype=np.float32),
            expected_ms=self.cost.predict(batch.size, plan.trees.num_nodes),
            plain_ms=self.cost.plain_ms(batch.size),
        )

    def observe(self, record: StepRecord) -> None:
        accepted = record.result.num_accepted
        tried = tried_tokens(record.trees.sizes, accepted)
        self.acceptance.add(int(tried.sum()), int(accepted.sum()))
        for i in np.flatnonzero(tried).tolist():
            own = self.requests.setdefault(record.trees.request_ids[i], Rate())
            own.add(int(tried[i]), int(accepted[i]))
        self._tokens += record.trees.num_requests + int(accepted.sum())
        super().observe(record)

    def finish(self, ending: Answer) -> None:
        self.requests.pop(ending.request_id, None)
        self.own.pop(ending.request_id, None)
