"""A rollout without an engine: recorded answers, any drafters and budget, a clock that is only counted.

The step is the engine's own (speculator.py), and so is its order (worker/v1/runner.py): endings of the step before,
admissions, the forward pass, verdicts, the time of the step before that, and the next drafts. An answer that ends in a
step is still drafted for in it, since the worker learns of its end with the next schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_specrollout.budgets.base import Budget
from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.drafters.base import Drafter
from vllm_specrollout.observe.guard import Guard
from vllm_specrollout.replay.cost import Cost, cost_of
from vllm_specrollout.replay.records import Header, Trace
from vllm_specrollout.replay.requests import RecordedDrafter, ReplayedRequest, requests_of, verified
from vllm_specrollout.scheduling.longest_first import Queue, Waiting
from vllm_specrollout.speculator import PlannedStep, Speculator
from vllm_specrollout.trees.batch import cut, num_branches
from vllm_specrollout.types import DraftMode, RequestBatch, StepTiming, TreeBatch, VerifyResult, empty_trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a trace under a budget."""

    makespan_ms: float
    # engine steps, and those of them that verified no draft
    steps: int
    steps_off: int
    # of decode steps: tokens yielded, and running requests, summed over the steps
    decode_tokens: int
    request_steps: int
    drafted: int
    accepted: int
    # per request, in order of admission: when it ended, in milliseconds since the start
    finish_ms: tuple[float, ...] = field(repr=False)
    # per step
    step_ms: tuple[float, ...] = field(repr=False)
    # per step: draft nodes verified
    nodes: tuple[int, ...] = field(repr=False)

    @property
    def busy_ms(self) -> float:
        """Of its steps together: the makespan without the times in which nobody was there."""
        return sum(self.step_ms)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a running request yields per decode step; 1 without drafts."""
        return self.decode_tokens / self.request_steps if self.request_steps else 1.0

    @property
    def wasted_nodes(self) -> int:
        return self.drafted - self.accepted


def replay(trace: Trace, budget: Budget, cost: Cost | None = None) -> Result:
    """Run a budget on a trace. Deterministic if the budget is.

    Args:
        budget: a fresh one.
        cost: milliseconds of a step; None: what the trace says (`cost.cost_of`).

    Raises:
        TraceError: no request of the trace has an end, or too few steps were timed.
    """
    cost = cost or cost_of(trace)
    requests = requests_of(trace, cost.prompt_share if isinstance(cost, CostLine) else 1.0)
    asking = AskingClock(cost)
    drafter = RecordedDrafter(trace, {request.view.request_id: request for request in requests}, asking.spend)
    return Replay(trace.header, cost, asking, [drafter], budget).run(requests)


class AskingClock:
    """Simulated time of the drafters, which nobody else's clock knows of."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._ms = 0.0
        self.asked = 0
        """Requests that drafters were asked for in the step at hand."""

    def __call__(self) -> float:
        """Seconds, as a clock has them."""
        return self._ms / 1e3

    def spend(self, num_requests: int) -> None:
        """Drafters are asked for so many requests: all of them at the price of one call, which is how it is timed."""
        if not self.asked:
            self.asked = num_requests
            self._ms += self._cost.ask_ms(num_requests)


class Replay:
    """The engine's stand-in: one batch, one queue, one clock. What it learned in a rollout it knows in the next one.

    Args:
        asking: the time of these drafters.
        order: which waiting request gets a place; None: the one that came first.
    """

    def __init__(
        self,
        header: Header,
        cost: Cost,
        asking: AskingClock,
        drafters: Sequence[Drafter],
        budget: Budget,
        order: Queue | None = None,
    ) -> None:
        self._header, self._cost, self._asking, self._order = header, cost, asking, order
        self._speculator = Speculator(drafters, budget, guard=Guard(is_strict=True), clock=asking)
        # of the step before, where budgets learn of it one step late
        self._late: StepTiming | None = None
        self._steps_before = 0
        self._begin([])

    def _begin(self, requests: Sequence[ReplayedRequest]) -> None:
        self._queue = deque(requests)
        self._running: list[ReplayedRequest] = []
        self._over: list[ReplayedRequest] = []
        self._now_ms = 0.0
        # of the next step: whom it may have drafts for, and which
        self._drafted_for: list[ReplayedRequest] = []
        self._planned: PlannedStep | None = None
        self._decode_tokens = self._request_steps = self._drafted = self._accepted = 0
        self._finish_ms: dict[int, float] = {}
        self._step_ms: list[float] = []
        self._nodes: list[int] = []

    def run(self, requests: Sequence[ReplayedRequest]) -> Result:
        """One rollout, from its first request to its last answer's end."""
        self._begin(requests)
        if self._order is not None:
            self._order.arrive()
        while self._running or self._queue or self._over:
            for request in self._over:
                self._end(request)
            self._over = []
            prompt_rows = self._schedule()
            if self._running:
                self._step(prompt_rows)
            elif self._queue:
                # nobody is there: wait for the next one
                self._now_ms = max(self._now_ms, self._queue[0].arrival.ready_ms)
        self._steps_before += len(self._nodes)
        return Result(
            makespan_ms=self._now_ms,
            steps=len(self._nodes),
            steps_off=self._nodes.count(0),
            decode_tokens=self._decode_tokens,
            request_steps=self._request_steps,
            drafted=self._drafted,
            accepted=self._accepted,
            finish_ms=tuple(self._finish_ms[number] for number in sorted(self._finish_ms)),
            step_ms=tuple(self._step_ms),
            nodes=tuple(self._nodes),
        )

    def _end(self, request: ReplayedRequest) -> None:
        ending = request.ending()
        self._speculator.finish(ending)
        self._speculator.forget(ending.request_id)
        if self._order is not None:
            self._order.observe(ending.problem_id, len(ending.token_ids))

    def _put_in_order(self) -> None:
        """Waiting requests, all of which have come, as the engine's scheduler orders them where memory is no limit."""
        places = self._header.max_num_seqs - len(self._running)
        if self._order is not None and self._order.is_due(len(self._queue), places):
            waiting = [
                Waiting(request.view.problem_id, request.arrival.max_tokens, request.arrival.request)
                for request in self._queue
            ]
            self._queue = deque(self._queue[i] for i in self._order.order(waiting))

    def _schedule(self) -> dict[str, int]:
        """Admit who has come and finds a place; returns the prompt rows that the step computes, by request."""
        self._put_in_order()
        header, rows = self._header, {}
        room = header.max_num_batched_tokens - sum(1 + r.num_nodes for r in self._running if not r.prompt_left)
        for request in self._running:
            if taken := request.take_rows(room):
                rows[request.view.request_id] = taken
                room -= taken
        while self._queue and room > 0 and len(self._running) < header.max_num_seqs:
            if self._queue[0].arrival.ready_ms > self._now_ms:
                break
            request = self._queue.popleft()
            self._running.append(request)
            self._speculator.admit(request.view)
            rows[request.view.request_id] = taken = request.take_rows(room)
            room -= taken
        return rows

    def _step(self, prompt_rows: dict[str, int]) -> None:
        """One forward pass and what follows it."""
        running = self._running
        trees = self._trees()
        timing = self._timing(prompt_rows, trees)
        result = verified(trees, [request.truth for request in self._drafted_for])
        self._speculator.observe(self._planned, trees, result)
        timing = replace(timing, tokens=self._advance(prompt_rows, trees, result))
        over = [request for request in running if request.is_over]
        if self._header.lag:
            # the next drafts are made at the step's end, before its time is known
            if self._late is not None:
                self._speculator.timed(self._late)
            self._draft(running)
        asked = self._asking.asked
        step_ms = self._cost.step_ms(timing, sum(prompt_rows.values()), asked)
        self._late = replace(timing, step_ms=step_ms, ask_ms=self._cost.ask_ms(asked))
        self._now_ms += step_ms
        self._step_ms.append(step_ms)
        self._nodes.append(timing.nodes)
        self._finish_ms |= {request.arrival.request: self._now_ms for request in over}
        self._over, self._running = over, [request for request in running if not request.is_over]
        if not self._header.lag:
            self._speculator.timed(self._late)
            self._draft(self._running)

    def _trees(self) -> TreeBatch:
        """The trees of the step: the plan's, without those of answers that ended meanwhile."""
        if self._planned is None:
            return empty_trees([request.view.request_id for request in self._drafted_for])
        trees = self._planned.plan.trees
        return cut(trees, np.where([request.is_over for request in self._drafted_for], 0, trees.sizes))

    def _timing(self, prompt_rows: dict[str, int], trees: TreeBatch) -> StepTiming:
        """What the forward pass has to do; tokens and time come later."""
        running = self._running
        return StepTiming(
            batch=len(running),
            rows=len(running) - len(prompt_rows) + sum(prompt_rows.values()) + trees.num_nodes,
            nodes=trees.num_nodes,
            branches=num_branches(trees),
            tokens=0,
            step_ms=0.0,
            is_decode_only=not prompt_rows,
            trees=int(np.count_nonzero(trees.sizes)),
            context=sum(len(request.view.token_ids) - 1 for request in running if request.position),
            waiting=sum(request.arrival.ready_ms <= self._now_ms for request in self._queue),
        )

    def _advance(self, prompt_rows: dict[str, int], trees: TreeBatch, result: VerifyResult) -> int:
        """Every request goes as far as its draft holds true, and one token further; returns the tokens of all."""
        drafted = zip(trees.sizes.tolist(), result.num_accepted.tolist(), strict=True)
        drafts = dict(zip(trees.request_ids, drafted, strict=True))
        tokens = 0
        for request in self._running:
            if request.prompt_left:
                continue
            name = request.view.request_id
            size, accepted = drafts.get(name, (0, 0))
            gained = min(accepted + 1, len(request.truth))
            request.advance(gained, self._header)
            request.num_nodes = 0
            tokens += gained
            if name not in prompt_rows:
                self._decode_tokens += gained
                self._request_steps += 1
                self._drafted += size
                self._accepted += accepted
        return tokens

    def _draft(self, running: Sequence[ReplayedRequest]) -> None:
        """The next step's drafts. Without a request to draft for, the budget is not asked either."""
        step, self._asking.asked = self._steps_before + len(self._nodes), 0
        self._drafted_for, self._planned = [], None
        requests = [r for r in running if r.position and r.arrival.shape is not DraftMode.OFF]
        if not requests or self._speculator.is_paused(step, len(requests)):
            return
        self._drafted_for = requests
        self._planned = self._speculator.propose(RequestBatch.of([request.view for request in requests]), step)
        for request, size in zip(requests, self._planned.plan.trees.sizes.tolist(), strict=True):
            request.num_nodes = size
