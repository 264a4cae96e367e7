"""A rollout without an engine: recorded answers, recorded proposals, any policy, a clock that is only counted.

The order of a step is the engine's (worker/v1/runner.py): endings of the step before, admissions, the forward pass,
verdicts, what the step before that cost, and the next drafts. An answer that ends in a step is still drafted for in it,
since the worker learns of its end with the next schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_specrollout.policies.budget import Policy, rests
from vllm_specrollout.replay.candidates import RecordedTrees, cut
from vllm_specrollout.replay.cost import Cost, CostLine, Load, cost_of
from vllm_specrollout.replay.records import Trace, TraceError
from vllm_specrollout.replay.requests import Request, requests_of, take_rows
from vllm_specrollout.trees.build import num_paths
from vllm_specrollout.types import (
    EMPTY_TREE,
    ROOT,
    DraftTree,
    Feedback,
    IntArray,
    Shape,
    StepTiming,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a trace under a policy."""

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


def replay(trace: Trace, policy: Policy, cost: Cost | None = None) -> Result:
    """Run a policy on a trace. Deterministic if the policy is.

    Args:
        policy: a fresh one.
        cost: milliseconds of a step; None: what the trace says (`cost.cost_of`).

    Raises:
        TraceError: no request of the trace has an end, or too few steps were timed.
    """
    return _Replay(trace, policy, cost or cost_of(trace)).run()


def accepted_nodes(tree: DraftTree, truth: IntArray) -> list[int]:
    """The nodes that a walk along the truth passes, from the root down."""
    path: list[int] = []
    node = ROOT
    children = {
        (parent, token): i
        for i, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    }
    for token in truth[: tree.size].tolist():
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path


class _Replay:
    """The engine's stand-in: one batch, one queue, one clock."""

    def __init__(self, trace: Trace, policy: Policy, cost: Cost) -> None:
        self._header = trace.header
        self._policy = policy
        self._cost = cost
        self._trees = RecordedTrees(trace)
        share = cost.prompt_share if isinstance(cost, CostLine) else 1.0
        self._queue = deque(requests_of(trace, share))
        if not self._queue:
            raise TraceError("no request of the trace has an end", "record until at least one answer is over")
        self._running: list[Request] = []
        self._over: list[Request] = []
        self._now_ms = 0.0
        self._late: StepTiming | None = None
        self._asked = self._before = 0
        self._decode_tokens = self._request_steps = self._drafted = self._accepted = 0
        self._finish_ms: dict[int, float] = {}
        self._step_ms: list[float] = []
        self._nodes: list[int] = []

    def run(self) -> Result:
        while self._running or self._queue:
            for request in self._over:
                self._policy.finish(request.ending())
            self._over = []
            prompt_rows = self._schedule()
            if self._running:
                self._step(prompt_rows)
            else:
                # nobody is there: wait for the next one
                self._now_ms = max(self._now_ms, self._queue[0].arrival.ready_ms)
        for request in self._over:
            self._policy.finish(request.ending())
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
        room = header.max_num_batched_tokens - sum(1 + r.tree.size for r in self._running if not r.prompt_left)
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
        batch = list(self._running)
        timing = self._load(batch, prompt_rows)
        feedback = self._walk(batch, prompt_rows)
        timing = replace(timing, tokens=sum(request.position for request in batch) - self._before)
        is_v1 = self._header.lag > 0
        if is_v1:
            # the next drafts are made at the step's end, before its time is known
            self._policy.observe(feedback, self._late)
            self._asked = self._draft(batch)
        load = Load(
            batch=timing.batch,
            nodes=timing.nodes,
            branches=timing.branches,
            trees=timing.trees,
            context=timing.context,
            prompt_rows=sum(prompt_rows.values()),
            asked=self._asked,
        )
        step_ms = self._cost.step_ms(load)
        ask_ms = step_ms - self._cost.step_ms(replace(load, asked=0)) if load.asked else 0.0
        self._late = replace(timing, step_ms=step_ms, ask_ms=ask_ms)
        self._now_ms += self._late.step_ms
        self._step_ms.append(self._late.step_ms)
        self._nodes.append(timing.nodes)
        for request in batch:
            if request.is_over:
                self._finish_ms[request.arrival.request] = self._now_ms
        self._over = [request for request in batch if request.is_over]
        self._running = [request for request in batch if not request.is_over]
        if not is_v1:
            self._policy.observe(feedback, self._late)
            self._asked = self._draft(self._running)

    def _load(self, batch: Sequence[Request], prompt_rows: dict[str, int]) -> StepTiming:
        """What the forward pass has to do; tokens and time come later."""
        self._before = sum(request.position for request in batch)
        trees = [request.tree for request in batch if request.tree.size]
        nodes = sum(tree.size for tree in trees)
        return StepTiming(
            batch=len(batch),
            rows=len(batch) - len(prompt_rows) + sum(prompt_rows.values()) + nodes,
            nodes=nodes,
            branches=sum(num_paths(tree.parents) - 1 for tree in trees),
            tokens=0,
            step_ms=0.0,
            is_decode_only=not prompt_rows,
            trees=len(trees),
            context=sum(r.arrival.num_prompt_tokens + r.position - 1 for r in batch if r.position),
            waiting=sum(request.arrival.ready_ms <= self._now_ms for request in self._queue),
        )

    def _walk(self, batch: Sequence[Request], prompt_rows: dict[str, int]) -> list[Feedback]:
        """Every request goes as far as its draft holds true, and one token further."""
        feedback = []
        for request in batch:
            if request.prompt_left:
                continue
            truth = request.end.token_ids[request.position :]
            tree = request.tree
            accepted = accepted_nodes(tree, truth)
            gained = min(len(accepted) + 1, len(truth))
            request.position += gained
            request.tree = EMPTY_TREE
            if tree.size:
                path = np.asarray(accepted, dtype=np.int32)
                verdict = (tree.parents, tree.source, tree.log_q, path)
                feedback.append(Feedback(request.name, tree.size, len(accepted), *verdict, len(batch)))
            if request.name not in prompt_rows:
                self._decode_tokens += gained
                self._request_steps += 1
                self._drafted += tree.size
                self._accepted += len(accepted)
        return feedback

    def _draft(self, batch: Sequence[Request]) -> int:
        """The next step's drafts, as `step.Speculation.prepare` makes them; returns how many requests were asked for.

        Without a request to draft for, the policy is not asked either.
        """
        requests = [r for r in batch if r.position and r.arrival.shape is not Shape.OFF]
        if not requests or rests(self._policy, len(requests)):
            return 0
        decisions = self._policy.decide([request.view(self._header) for request in requests])
        if not any(decision.max_nodes for decision in decisions):
            return 0
        proposals = [
            cut(self._trees.at(r.arrival.request, r.position, r.end.token_ids), decision)
            for r, decision in zip(requests, decisions, strict=True)
        ]
        for request, tree in zip(requests, self._policy.choose(proposals, decisions), strict=True):
            request.tree = tree
        return len(requests)
