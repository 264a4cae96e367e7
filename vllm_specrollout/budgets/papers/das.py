"""DAS's draft budget per length class. What belongs here: classes, and from a class to a number of nodes.

Source: DAS ("Spending the Draft Budget on the Long Tail"). It maps the classes Long, Medium and Short to budgets with a
formula from a linear latency model, without giving the formula; the one used here is derived below.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specrollout.budgets.papers.plans import (
    PaperBudget,
    Rate,
    chain_limits,
    no_drafts,
    tokens_per_step,
    tried_tokens,
)
from vllm_specrollout.budgets.step_cost import StepCost
from vllm_specrollout.scheduling.lengths import Lengths
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    FinishReason,
    IntArray,
    RequestBatch,
    StepRecord,
)

SHORT, MEDIUM, LONG = range(3)
"""Length classes."""
SHARES = (0.5, 0.8)
"""Of what the longest running answer still needs: a Medium one needs the first of it, a Long one the second. The text
gives no numbers."""
PROBE_EVERY = 32
"""Steps in which no draft is worth it after which one token is drafted: acceptance changes, also while nobody looks."""
_PRIOR_P, _PRIOR_TOKENS = 0.7, 8.0
"""Acceptance before anything was seen, and how many tokens that is worth."""


class DasBudget(PaperBudget):
    """Long answers get the draft that ends them soonest, medium ones half of it, short ones none.

    The rollout waits for its longest answer, so classes are relative to that: an answer is Long if it is expected to
    need nearly as many more tokens as the running one that needs most, and Medium if about half as many. Answers that
    are all alike are all Long. Expectations are revised in each step.

    With p the probability that a drafted token is accepted, an answer that still needs R tokens takes R / E(k) steps
    when k are drafted, E(k) = (1 - p^(k+1)) / (1 - p). A step in which every Long answer drafts k and every Medium one
    k / 2 takes plain(B) + added(B, n_long * k + n_medium * (k / 2)) milliseconds. The longest answer ends soonest at
    the k with the least time / E(k).
    """

    def __init__(self, max_nodes: int, max_depth: int, *, cost: StepCost | None = None) -> None:
        super().__init__(max_nodes, max_depth, cost)
        self.lengths = Lengths()
        self.acceptance = Rate(_PRIOR_TOKENS, _PRIOR_P * _PRIOR_TOKENS)
        self._not_worth_it = 0  # steps in a row

    def classes(self, batch: RequestBatch) -> npt.NDArray[np.int8]:
        """[R] the class of each request as it stands."""
        left = np.empty(batch.size)
        for i, view in enumerate(batch.views):
            generated = len(view.token_ids) - view.num_prompt_tokens
            most = generated + view.max_new_tokens
            left[i] = self.lengths.expected_total(view.problem_id, generated, most) - generated
        share = left / max(left.max(initial=0.0), 1.0)
        return np.searchsorted(SHARES, share, side="right").astype(np.int8)

    def best_size(self, num_requests: int, num_long: int, num_medium: int) -> int:
        """The chain of a Long answer, 0 to the engine's limit, that ends it soonest; the smallest of several.

        Args:
            num_requests: running requests, those included that do not draft.
            num_long, num_medium: requests of these classes that may draft.
        """
        sizes = np.arange(min(self.max_nodes, self.max_depth) + 1)
        nodes = num_long * sizes + num_medium * (sizes // 2)
        ms = self.cost.plain_ms(num_requests) + self.cost.added_ms(num_requests, int(nodes[-1]))[nodes]
        return int(np.argmin(ms / tokens_per_step(self.acceptance.mean, sizes)))

    def limits(self, batch: RequestBatch) -> DraftLimits:
        kinds = self.classes(batch)
        may_draft = batch.max_nodes > 0
        num_long, num_medium = (int(np.count_nonzero(may_draft & (kinds == kind))) for kind in (LONG, MEDIUM))
        if not num_long and not num_medium:
            return no_drafts(batch, "short answers")
        size = self.best_size(batch.size, num_long, num_medium)
        reason = "length class"
        self._not_worth_it = 0 if size else self._not_worth_it + 1
        if not size:
            if self._not_worth_it % PROBE_EVERY:
                return no_drafts(batch, "not worth its cost")
            size, reason = 1, "probe"
        sizes: IntArray = np.asarray([0, size // 2, size], dtype=np.int32)[kinds]
        return chain_limits(batch, sizes, reason)

    def observe(self, record: StepRecord) -> None:
        accepted = record.result.num_accepted
        tried = tried_tokens(record.trees.sizes, accepted)
        self.acceptance.add(int(tried.sum()), int(accepted.sum()))
        super().observe(record)

    def finish(self, ending: Answer) -> None:
        if ending.status is not FinishReason.ABORTED:  # its length says nothing of where it was going
            self.lengths.observe(ending.problem_id, len(ending.token_ids))
