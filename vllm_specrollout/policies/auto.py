"""The budget that is on by default: all candidate nodes of all requests compete for what the next step can bear.

What belongs here: the order of the questions, and when drafting is switched off and on. The answers are in
`cost_model` (what it costs), `acceptance` (whether it is accepted), `length` and `makespan` (what that is worth) and
`allocate` (which nodes, then). See docs/concepts/budget.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_specrollout.policies.acceptance import Acceptance
from vllm_specrollout.policies.allocate import Allocation, Prices, allocate
from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.policies.forest import Forest, forest_of, kept
from vllm_specrollout.policies.length import Lengths
from vllm_specrollout.policies.makespan import level_with_waiting, token_worth
from vllm_specrollout.types import (
    Choice,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
    Status,
    StepTiming,
)

_CASES = 8  # equally likely lengths that each answer is given
_WEIGH_EVERY = 8  # steps after which answers are weighed anew, also when none came or went
_RATE_MEMORY = 0.9  # weight left to a request's tokens per step after each further step
_MARGIN_ON = 0.03  # share of a plain step that drafts must be expected to save before they are switched on again
_PATIENCE = 16  # steps in a row that drafts do not pay before they are switched off
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64  # steps without asking drafters; each further one is twice as long
_PROBES = 2  # nodes verified, at most, where nothing pays: how else would it be noticed that it does again?


@dataclass(slots=True)
class _Pace:
    """How fast one request goes."""

    # tokens it has, prompt included
    length: int
    tokens_per_step: float = 1.0
    # draft nodes verified per step
    nodes: float = 0.0


@dataclass(slots=True)
class _Switch:
    """Whether drafters are asked at all. Slow on purpose: a single step decides nothing."""

    is_on: bool = True
    # steps in a row in which something was proposed and nothing paid
    losses: int = 0
    pause: int = _FIRST_PAUSE
    # steps until the next try
    left: int = 0

    def asks(self) -> bool:
        """Called once per step."""
        if self.is_on:
            return True
        self.left -= 1
        return self.left < 0

    def judge(self, share: float, has_candidates: bool) -> None:
        """share: what drafts were expected to save, as a share of a plain step; 0.0 if nothing pays."""
        if not self.is_on:
            if share > _MARGIN_ON:
                self.is_on, self.losses, self.pause = True, 0, _FIRST_PAUSE
                return
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
            self.left = self.pause
            return
        if share > 0.0:
            self.losses = 0
        elif has_candidates:
            self.losses += 1
            if self.losses >= _PATIENCE:
                self.is_on, self.left = False, self.pause


@dataclass(slots=True)
class _Step:
    """What `decide` saw, for `choose`."""

    views: Sequence[RequestView] = ()
    is_asking: bool = True
    context: int = 0
    # [R] milliseconds that a token of each request is worth
    worth: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class AutoBudget:
    """Verifies a node while the makespan it saves exceeds the milliseconds it costs.

    Args:
        max_nodes, max_depth: the engine's limits per request.
        length_weight: False: an answer's tokens are worth the same however long it may still become.
    """

    def __init__(self, max_nodes: int, max_depth: int, *, length_weight: bool = True) -> None:
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.length_weight = length_weight
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.lengths = Lengths()
        self.switch = _Switch()
        self._pace: dict[str, _Pace] = {}
        self._step = _Step()
        self._weighed_for: list[str] = []
        self._weighed = 0
        self._waiting = 0
        self._choice: Choice | None = None

    # --- before drafting ---------------------------------------------------------------------------------------------

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        for view in views:
            self.acceptance.meet(view)
            self._follow(view)
        is_asking = self.switch.asks()
        self._step = _Step(views, is_asking, sum(len(view.token_ids) for view in views), self._worth(views))
        if not is_asking:
            plain_ms = self._plain_ms(len(views))
            self._choice = Choice(False, "drafts do not pay", 0, 0.0, plain_ms, plain_ms)
            return [Decision(0, 0, Shape.OFF, reason="drafts do not pay")] * len(views)
        return [may_draft(view, self.max_nodes, self.max_depth, "auto budget") for view in views]

    def _follow(self, view: RequestView) -> None:
        pace = self._pace.get(view.request_id)
        if pace is None:
            self._pace[view.request_id] = _Pace(len(view.token_ids))
            return
        new = max(len(view.token_ids) - pace.length, 1)
        pace.length = len(view.token_ids)
        pace.tokens_per_step += (1.0 - _RATE_MEMORY) * (new - pace.tokens_per_step)

    def _worth(self, views: Sequence[RequestView]) -> npt.NDArray[np.float64]:
        """[R] milliseconds; kept for some steps, since lengths are guesses and do not change from step to step."""
        names = [view.request_id for view in views]
        if names == self._weighed_for and self._weighed < _WEIGH_EVERY:
            self._weighed += 1
            return self._step.worth
        self._weighed_for, self._weighed = names, 0
        if not views:
            return np.zeros(0)
        paces = [self._pace[name] for name in names]
        rate = np.asarray([pace.tokens_per_step for pace in paces])
        row = self.cost.row_at(len(views))
        request_ms = self.cost.request + row * (1.0 + np.asarray([pace.nodes for pace in paces]))
        if not self.length_weight:
            return token_worth(np.ones((len(views), 1)), rate, self.cost.fixed, request_ms, by_length=False)
        steps = np.stack([self._steps_left(view) for view in views]) / rate[:, None]
        mean_steps = (self.lengths.mean() or float(steps.mean())) / float(rate.mean())
        steps = level_with_waiting(steps, self._waiting * mean_steps)
        return token_worth(steps, rate, self.cost.fixed, request_ms)

    def _steps_left(self, view: RequestView) -> npt.NDArray[np.float64]:
        generated = len(view.token_ids) - view.num_prompt_tokens
        return self.lengths.remaining(view.problem_id, generated, generated + view.max_new_tokens, _CASES)

    # --- after drafting ----------------------------------------------------------------------------------------------

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        batch = len(trees)
        plain_ms = self._plain_ms(batch)
        forest = forest_of(trees)
        if not forest.size:
            self._note(np.zeros(batch))
            self._choice = Choice(True, "nothing proposed", 0, 0.0, plain_ms, plain_ms)
            return list(trees)
        p = self.acceptance.probabilities(forest, [view.request_id for view in self._step.views])
        if any(decision.shape is Shape.CHAIN for decision in decisions):
            is_chain = np.asarray([decision.shape is Shape.CHAIN for decision in decisions])
            p[is_chain[forest.owner] & ~forest.is_first_child()] = 1e-300
        reach = np.exp(forest.sum_from_root(np.log(p)))
        rows = self.cost.added_rows(batch, forest.size)
        prices = Prices(rows, self.cost.draft, self.cost.tree, self.cost.branch)
        found = allocate(forest, reach * self._step.worth[forest.owner], prices)
        was_on = self.switch.is_on
        self.switch.judge(found.net / plain_ms, True)
        keep = found.keep
        reason = "pays" if was_on else "pays again" if self.switch.is_on else "probe"
        if not keep.any() or not self.switch.is_on:
            keep, reason = self._probe(reach, was_on)
        chosen = kept(trees, forest, keep)
        self._note(np.bincount(forest.owner[keep], minlength=batch))
        gain = float(reach[keep].sum())
        self._choice = Choice(
            self.switch.is_on,
            reason,
            int(keep.sum()),
            gain,
            plain_ms + self._cost_of(forest, keep, prices, found),
            plain_ms,
        )
        return chosen

    def _cost_of(self, forest: Forest, keep: npt.NDArray[np.bool_], prices: Prices, found: Allocation) -> float:
        nodes = int(keep.sum())
        return found.cost if keep is found.keep else float(prices.rows[nodes]) + (prices.draft if nodes else 0.0)

    def _probe(self, reach: npt.NDArray[np.float64], was_on: bool) -> tuple[npt.NDArray[np.bool_], str]:
        """Where nothing pays: nothing, but now and then a node or two, so that acceptance stays known."""
        keep = np.zeros(len(reach), dtype=np.bool_)
        if was_on:
            return keep, "nothing pays"
        # the likeliest nodes of all: no parent is less likely than its child, and the first of equals comes first
        keep[np.argsort(-reach, kind="stable")[:_PROBES]] = True
        return keep, "probe"

    def _note(self, nodes: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
        """nodes: [R] verified of each request."""
        for view, count in zip(self._step.views, nodes.tolist(), strict=True):
            pace = self._pace[view.request_id]
            pace.nodes += (1.0 - _RATE_MEMORY) * (count - pace.nodes)

    def _plain_ms(self, batch: int) -> float:
        return self.cost.predict(batch, batch=batch, context=self._step.context)

    # --- learning ----------------------------------------------------------------------------------------------------

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        self.acceptance.observe(feedback)
        if timing is not None:
            self._waiting = timing.waiting
            self.cost.observe(timing)

    def finish(self, ending: Ending) -> None:
        self.acceptance.finish(ending.request_id, ending.problem_id)
        self._pace.pop(ending.request_id, None)
        if ending.status is not Status.ABORTED:  # its length says nothing of where it was going
            self.lengths.observe(ending.problem_id, len(ending.token_ids))

    def explain(self) -> Choice | None:
        return self._choice
