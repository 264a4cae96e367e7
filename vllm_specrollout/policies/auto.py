"""The budget that is on by default: all candidate nodes of all requests compete for what the next step can bear.

What belongs here: the order of the questions. The answers are in `cost_model` (what it costs), `acceptance` (whether it
is accepted), `length` and `makespan` (what that is worth), `pick` (which nodes, then) and `switch` (whether at all).
See docs/concepts/budget.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_specrollout.policies.acceptance import Acceptance
from vllm_specrollout.policies.budget import may_draft
from vllm_specrollout.policies.cost_model import StepCost
from vllm_specrollout.policies.length import Lengths
from vllm_specrollout.policies.makespan import level, token_worth, weights
from vllm_specrollout.policies.pick import NAIVE, Kernels, PickRequest, Prices
from vllm_specrollout.policies.switch import MARGIN_ON, PLAIN_PROBE, STAY, Asking, PlainSteps, Switch
from vllm_specrollout.types import (
    EMPTY_TREE,
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
_KNOWN_LENGTHS = 8  # answers that must have ended before guesses at lengths count
_WEIGH_EVERY = 4  # steps after which answers are weighed anew, also when none came or went
_RATE_MEMORY = 0.95  # weight left to a request's tokens per step after each further step
_PACE_PRIOR = 2.0  # steps that what a request starts from counts for
_LEARN_EVERY = 8  # steps whose times are learned from in one go, which is cheaper than one by one
_JUDGE_EVERY, _JUDGE_MANY = 4, 16  # steps, and drafts, whose verdicts are learned from in one go, for the same reason
_PROBES = 2  # nodes verified, at most, where nothing pays: how else would it be noticed that it does again?


@dataclass(slots=True)
class _Pace:
    """How fast one request goes."""

    # tokens it has, prompt included
    length: int
    tokens_per_step: float = 1.0
    # draft nodes verified per step
    nodes: float = 0.0
    # steps seen of it
    seen: int = 0

    def approach(self, tokens_per_step: float, nodes: float) -> None:
        """Take in a step, or another's pace: the first ones by mean, later ones with fading memory."""
        self.seen += 1
        share = max(1.0 - _RATE_MEMORY, 1.0 / (self.seen + _PACE_PRIOR))
        self.tokens_per_step += share * (tokens_per_step - self.tokens_per_step)
        self.nodes += share * (nodes - self.nodes)


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
        kernels: the loops over all nodes of a batch; engines pass in faster ones.
    """

    def __init__(self, max_nodes: int, max_depth: int, *, length_weight: bool = True, kernels: Kernels = NAIVE) -> None:
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.length_weight = length_weight
        self.cost = StepCost()
        self.kernels = kernels
        self.acceptance = Acceptance(kernels.reached)
        self.lengths = Lengths()
        self.switch = Switch()
        self._asking = Asking()
        self._plain = PlainSteps()
        self._pace: dict[str, _Pace] = {}
        # what an answer starts from: the pace of those that ended
        self._usual = _Pace(0)
        # request -> nodes that its last step verified
        self._nodes: dict[str, int] = {}
        self._step = _Step()
        self._weighed_for: list[str] = []
        self._weighed = 0
        self._waiting = 0
        # steps since requests were last looked at
        self._rested = 0
        # what is yet to be learned from, and how many steps the verdicts are of
        self._timings: list[StepTiming] = []
        self._verdicts: list[Feedback] = []
        self._judged = 0
        self._choice: Choice | None = None

    # --- before drafting ---------------------------------------------------------------------------------------------

    def rests(self, batch: int) -> bool:
        if not self.switch.is_resting:
            return False
        self.switch.asks()
        self._rested += 1
        self._nothing_pays(batch)
        return True

    def rest_left(self) -> int:
        return self.switch.rest_left

    def _nothing_pays(self, batch: int) -> None:
        plain_ms = self._plain_ms(batch)
        self._choice = Choice(False, "drafts do not pay", 0, 0.0, plain_ms, plain_ms)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        steps, self._rested = 1 + self._rested, 0
        context = self._follow(views, steps)
        is_asking = self.switch.asks()
        self._step = _Step(views, is_asking, context, self._worth(views, steps))
        if not is_asking:
            self._nothing_pays(len(views))
            return [Decision(0, 0, Shape.OFF, reason="drafts do not pay")] * len(views)
        return [may_draft(view, self.max_nodes, self.max_depth, "auto budget") for view in views]

    def _follow(self, views: Sequence[RequestView], steps: int) -> int:
        """Take in how far each request has come in so many steps; returns the tokens of all."""
        paces, context = self._pace, 0
        for view in views:
            length = len(view.token_ids)
            context += length
            pace = paces.get(view.request_id)
            if pace is None:
                self.acceptance.meet(view)
                paces[view.request_id] = _Pace(length, self._usual.tokens_per_step, self._usual.nodes)
                continue
            if length > pace.length:
                pace.approach((length - pace.length) / steps, self._nodes.get(view.request_id, 0))
            pace.length = length
        self._nodes = {}
        if views:
            self.acceptance.weights_are(views[0].weights_version)
        return context

    def _worth(self, views: Sequence[RequestView], steps: int) -> npt.NDArray[np.float64]:
        """[R] milliseconds; kept for some steps, since lengths are guesses and do not change from step to step."""
        names = [view.request_id for view in views]
        self._weighed += steps
        if names == self._weighed_for and self._weighed <= _WEIGH_EVERY:
            return self._step.worth
        self._weighed_for, self._weighed = names, 0
        if not views:
            return np.zeros(0)
        paces = [self._pace[name] for name in names]
        rate = np.asarray([pace.tokens_per_step for pace in paces])
        nodes = np.asarray([pace.nodes for pace in paces])
        prices = self._prices(len(views), float(nodes.sum()))
        trust = self._trust(views)
        # all alike, as far as lengths are not known
        weight = np.full(len(views), (1.0 - trust) / len(views))
        if trust > 0.0:
            weight += trust * self._weights(views, float(rate.mean()))
        return token_worth(weight, rate, nodes, *prices)

    def _weights(self, views: Sequence[RequestView], rate: float) -> npt.NDArray[np.float64]:
        """[R] steps that one more token of each saves, as far as lengths are known.

        rate: tokens per step of all alike. Each one's own would say who was drafted for lately: who is ahead would then
        get nothing, fall behind, and be found to have fallen behind when it is too late to be caught up with.
        """
        busy = np.stack([self._tokens_left(view) for view in views]) / rate
        if self._waiting:
            busy = np.maximum(busy, level(busy.mean(axis=1), self._waiting * self.lengths.mean / rate))
        return weights(busy, rate)

    def _prices(self, batch: int, nodes: float) -> tuple[float, float, float]:
        """Milliseconds of a step whatever is in it, of a request, of a node: a straight line through what steps cost.

        It meets the bent one at a plain step and at one of so many nodes, so that a token is worth its share of those.
        """
        plain_ms = self._plain_ms(batch)
        request_ms = min(self.cost.request + self.cost.row_at(batch - 1), plain_ms / batch)
        more = max(round(nodes), 1)
        row_ms = (float(self.cost.added_rows(batch, more)[-1]) + self.cost.draft + self.cost.tree * batch) / more
        return plain_ms - batch * request_ms, request_ms, row_ms

    def _trust(self, views: Sequence[RequestView]) -> float:
        """How far the guesses at lengths may be trusted: as far as the problems are known."""
        if not self.length_weight or self.lengths.num_known < _KNOWN_LENGTHS:
            return 0.0
        return sum(self.lengths.trust(view.problem_id) for view in views) / len(views)

    def _tokens_left(self, view: RequestView) -> npt.NDArray[np.float64]:
        generated = len(view.token_ids) - view.num_prompt_tokens
        return self.lengths.remaining(view.problem_id, generated, generated + view.max_new_tokens, _CASES)

    # --- after drafting ----------------------------------------------------------------------------------------------

    def choose(self, trees: Sequence[DraftTree], decisions: Sequence[Decision]) -> list[DraftTree]:
        batch = len(trees)
        plain_ms = self._plain_ms(batch)
        num_nodes = sum(tree.size for tree in trees)
        ask_ms = self._asking.predict(batch)
        if not num_nodes:
            self._choice = Choice(True, "nothing proposed", 0, 0.0, plain_ms + ask_ms, plain_ms)
            return list(trees)
        was_on = self.switch.is_on
        picked = self.kernels.pick(trees, self._request(decisions, num_nodes, plain_ms))
        # the drafters have been asked already, so what pays is verified; but it may not be worth asking again
        share = picked.net / plain_ms
        does_pay = picked.net > (STAY * plain_ms if was_on else 0.0)
        self.switch.judge(((picked.net if does_pay else 0.0) - ask_ms) / plain_ms)
        if was_on and self._plain.is_due(picked.num_nodes, share):
            self._choice = Choice(True, PLAIN_PROBE, 0, 0.0, plain_ms + ask_ms, plain_ms)
            return [EMPTY_TREE] * batch
        self._nodes = {view.request_id: tree.size for view, tree in zip(self._step.views, picked.trees, strict=True)}
        nodes = picked.num_nodes
        names = ("pays", "nothing pays") if was_on else ("pays again", "probe")
        reason = names[0] if (nodes if was_on else self.switch.is_on) else names[1]
        expected_ms = plain_ms + picked.cost + ask_ms
        self._choice = Choice(self.switch.is_on, reason, nodes, picked.tokens, expected_ms, plain_ms)
        return picked.trees

    def _request(self, decisions: Sequence[Decision], num_nodes: int, plain_ms: float) -> PickRequest:
        views, is_on = self._step.views, self.switch.is_on
        by_bucket, by_depth = self.acceptance.tables()
        return PickRequest(
            by_bucket,
            by_depth,
            np.asarray([self.acceptance.factor(view.request_id) for view in views]),
            self._step.worth,
            np.asarray([decision.shape is Shape.CHAIN for decision in decisions]),
            np.asarray([decision.max_nodes for decision in decisions], np.int64),
            np.asarray([decision.max_depth for decision in decisions], np.int64),
            Prices(self.cost.added_rows(len(views), num_nodes), self.cost.draft, self.cost.tree, self.cost.branch),
            least_net=STAY * plain_ms if is_on else MARGIN_ON * plain_ms + self._asking.predict(len(views)),
            probes=0 if is_on else _PROBES,
        )

    def _plain_ms(self, batch: int) -> float:
        return self.cost.predict(batch, batch=batch, context=self._step.context)

    # --- learning ----------------------------------------------------------------------------------------------------

    def observe(self, feedback: Sequence[Feedback], timing: StepTiming | None) -> None:
        if feedback:
            self._verdicts += feedback
            self._judged += 1
            if self._judged >= _JUDGE_EVERY or len(self._verdicts) >= _JUDGE_MANY or not self.cost.is_settled:
                self._judge()
        if timing is not None:
            self._waiting = timing.waiting
            if self.switch.is_on:
                self._asking.observe(timing.batch, timing.ask_ms)
            self._timings.append(timing)
            if len(self._timings) >= _LEARN_EVERY or not self.cost.is_settled:
                self._learn()

    def _judge(self) -> None:
        self.acceptance.observe(self._verdicts)
        self._verdicts, self._judged = [], 0

    def _learn(self) -> None:
        """Take in what steps cost. The line changes every so many steps only, so they lose nothing by waiting."""
        for timing in self._timings:
            plain = replace(timing, step_ms=timing.step_ms - timing.ask_ms) if timing.ask_ms else timing
            self.cost.observe(plain)
        self._timings.clear()

    def finish(self, ending: Ending) -> None:
        if self._verdicts:
            self._judge()
        self.acceptance.finish(ending.request_id, ending.problem_id)
        pace = self._pace.pop(ending.request_id, None)
        if pace is not None:
            self._usual.approach(pace.tokens_per_step, pace.nodes)
        if ending.status is not Status.ABORTED:  # its length says nothing of where it was going
            self.lengths.observe(ending.problem_id, len(ending.token_ids))

    def explain(self) -> Choice | None:
        return self._choice
