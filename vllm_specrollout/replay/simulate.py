"""A rollout without an engine: recorded answers, recorded proposals, any budget, a clock that is only counted.

The order of a step is the engine's (worker/v1/runner.py): endings of the step before, admissions, the forward pass,
verdicts, the record of the step before that, and the next drafts. An answer that ends in a step is still drafted for in
it, since the worker learns of its end with the next schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_specrollout.budgets.base import Backoff, Budget
from vllm_specrollout.replay.candidates import RecordedTrees, of_sources
from vllm_specrollout.replay.cost import Cost, CostLine, Load, cost_of, load_of
from vllm_specrollout.replay.records import Trace, TraceError
from vllm_specrollout.replay.requests import Request, requests_of, take_rows
from vllm_specrollout.replay.verify import verified
from vllm_specrollout.trees.batch import batch_of, cut, num_branches
from vllm_specrollout.types import (
    DraftMode,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    empty_trees,
)


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
    return _Replay(trace, budget, cost or cost_of(trace)).run()


class _Replay:
    """The engine's stand-in: one batch, one queue, one clock."""

    def __init__(self, trace: Trace, budget: Budget, cost: Cost) -> None:
        self._header = trace.header
        self._budget = budget
        self._backoff = Backoff()
        self._cost = cost
        self._proposals = RecordedTrees(trace)
        share = cost.prompt_share if isinstance(cost, CostLine) else 1.0
        self._queue = deque(requests_of(trace, share))
        if not self._queue:
            raise TraceError("no request of the trace has an end", "record until at least one answer is over")
        self._running: list[Request] = []
        self._over: list[Request] = []
        self._now_ms = 0.0
        # of the next step: whom it has drafts for, and which
        self._drafted_for: list[Request] = []
        self._batch: RequestBatch | None = None
        self._plan: StepPlan | None = None
        # the step before, for a budget that learns of it one step late
        self._late: StepRecord | None = None
        self._asked = 0
        self._decode_tokens = self._request_steps = self._drafted = self._accepted = 0
        self._finish_ms: dict[int, float] = {}
        self._step_ms: list[float] = []
        self._nodes: list[int] = []

    def run(self) -> Result:
        while self._running or self._queue:
            for request in self._over:
                self._budget.finish(request.ending())
            self._over = []
            prompt_rows = self._schedule()
            if self._running:
                self._step(prompt_rows)
            else:
                # nobody is there: wait for the next one
                self._now_ms = max(self._now_ms, self._queue[0].arrival.ready_ms)
        for request in self._over:
            self._budget.finish(request.ending())
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

    def _schedule(self) -> dict[str, int]:
        """Admit who has come and finds a place; returns the prompt rows that the step computes, by request."""
        header = self._header
        room = header.max_num_batched_tokens - sum(1 + r.num_nodes for r in self._running if not r.prompt_left)
        rows: dict[str, int] = {}
        for request in self._running:
            room = take_rows(request, room, rows)
        while (
            self._queue
            and room > 0
            and len(self._running) < header.max_num_seqs
            and self._queue[0].arrival.ready_ms <= self._now_ms
        ):
            request = self._queue.popleft()
            self._running.append(request)
            room = take_rows(request, room, rows)
        return rows

    def _step(self, prompt_rows: dict[str, int]) -> None:
        """One forward pass and what follows it."""
        running = list(self._running)
        trees = self._trees()
        timing = self._timing(running, prompt_rows, trees)
        truths = [request.end.token_ids[request.position :] for request in self._drafted_for]
        record = StepRecord(self._plan, trees, verified(trees, truths), batch=self._batch)
        timing = replace(timing, tokens=self._advance(running, prompt_rows, record))
        is_v1 = self._header.lag > 0
        if is_v1:
            # the next drafts are made at the step's end, before its time is known
            if self._late is not None:
                self._budget.observe(self._late)
            self._asked = self._draft(running)
        load = replace(load_of(timing), prompt_rows=sum(prompt_rows.values()), asked=self._asked)
        step_ms = self._cost.step_ms(load)
        self._late = replace(record, timing=replace(timing, step_ms=step_ms, ask_ms=self._ask_ms(load)))
        self._now_ms += step_ms
        self._step_ms.append(step_ms)
        self._nodes.append(timing.nodes)
        for request in running:
            if request.is_over:
                self._finish_ms[request.arrival.request] = self._now_ms
        self._over = [request for request in running if request.is_over]
        self._running = [request for request in running if not request.is_over]
        if not is_v1:
            self._budget.observe(self._late)
            self._asked = self._draft(self._running)

    def _trees(self) -> TreeBatch:
        """The trees of the step: the plan's, without those of answers that ended meanwhile."""
        if self._plan is None:
            return empty_trees([request.name for request in self._drafted_for])
        trees, is_over = self._plan.trees, [request.is_over for request in self._drafted_for]
        return cut(trees, np.where(is_over, 0, trees.sizes))

    def _ask_ms(self, load: Load) -> float:
        """What of a step's time asking drafters takes."""
        return self._cost.step_ms(load) - self._cost.step_ms(replace(load, asked=0)) if load.asked else 0.0

    def _timing(self, running: Sequence[Request], prompt_rows: dict[str, int], trees: TreeBatch) -> StepTiming:
        """What the forward pass has to do; tokens and time come later."""
        return StepTiming(
            batch=len(running),
            rows=len(running) - len(prompt_rows) + sum(prompt_rows.values()) + trees.num_nodes,
            nodes=trees.num_nodes,
            branches=num_branches(trees),
            tokens=0,
            step_ms=0.0,
            is_decode_only=not prompt_rows,
            trees=int(np.count_nonzero(trees.sizes)),
            context=sum(r.arrival.num_prompt_tokens + r.position - 1 for r in running if r.position),
            waiting=sum(request.arrival.ready_ms <= self._now_ms for request in self._queue),
        )

    def _advance(self, running: Sequence[Request], prompt_rows: dict[str, int], record: StepRecord) -> int:
        """Every request goes as far as its draft holds true, and one token further; returns the tokens of all."""
        before = sum(request.position for request in running)
        drafted = zip(record.trees.sizes.tolist(), record.result.num_accepted.tolist(), strict=True)
        drafts = dict(zip((request.name for request in self._drafted_for), drafted, strict=True))
        for request in running:
            if request.prompt_left:
                continue
            size, accepted = drafts.get(request.name, (0, 0))
            gained = min(accepted + 1, len(request.end.token_ids) - request.position)
            request.position += gained
            request.num_nodes = 0
            if request.name not in prompt_rows:
                self._decode_tokens += gained
                self._request_steps += 1
                self._drafted += size
                self._accepted += accepted
        self._drafted_for, self._batch, self._plan = [], None, None
        return sum(request.position for request in running) - before

    def _draft(self, running: Sequence[Request]) -> int:
        """The next step's drafts, as the speculator makes them; returns how many requests drafters were asked for.

        Without a request to draft for, the budget is not asked either.
        """
        step = len(self._nodes)
        requests = [r for r in running if r.position and r.arrival.shape is not DraftMode.OFF]
        if not requests or self._backoff.is_paused(step) or self._budget.steps_off(len(requests)):
            return 0
        batch = RequestBatch.of([request.view(self._header) for request in requests])
        limits = self._budget.limits(batch)
        if not limits.wants_any:
            return 0
        found = [self._proposals.at(r.arrival.request, r.position, r.end.token_ids) for r in requests]
        if limits.drafters is not None:
            found = [of_sources(tree, wanted) for tree, wanted in zip(found, limits.drafters.tolist(), strict=True)]
        proposal = batch_of(batch.request_ids, found)
        draft_ms = self._ask_ms(Load(batch=len(requests), asked=len(requests)))
        self._plan = self._budget.choose([proposal], limits, batch, draft_ms)
        self._backoff.asked(step, self._plan.pays)
        self._drafted_for, self._batch = requests, batch
        for request, size in zip(requests, self._plan.trees.sizes.tolist(), strict=True):
            request.num_nodes = size
        return len(requests)
