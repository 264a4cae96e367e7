"""Small traces and a budget that tests share."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.trees import tree_of
from vllm_specrollout.budgets.base import BaseBudget
from vllm_specrollout.budgets.step_cost import CostLine
from vllm_specrollout.replay.records import Arrival, Candidates, End, Header, Record, Step, Trace
from vllm_specrollout.trees.batch import merge_select
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    DraftTree,
    RequestBatch,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
)

LINE = CostLine(fixed=10.0, request=1.0, draft=2.0, node=0.5, branch=0.25, ask=0.1, prompt_row=0.01)


def decode_step(batch: int, nodes: int = 0, branches: int = 0) -> StepTiming:
    """What it has to do; it has no time."""
    return StepTiming(batch, batch + nodes, nodes, branches, batch, 0.0, True)


def tree(tokens: Sequence[int], parents: Sequence[int], probability: float = 0.5, source: int = 0) -> DraftTree:
    return tree_of(parents, tokens, [probability] * len(tokens), source)


def header(batch: int = 2, cost: CostLine | None = LINE, **values: object) -> Header:
    facts = {"max_num_seqs": batch, "max_draft_tokens": 8, "max_depth": 4, **values}
    return Header(**facts, cost=cost or CostLine())  # type: ignore[arg-type]


def trace_of(
    answers: Sequence[Sequence[int]], candidates: Sequence[Candidates] = (), batch: int = 2, prompt: int = 10
) -> Trace:
    """Answers that were all there at once, in this order."""
    arrivals = tuple(
        Arrival(request=i, step=0, num_prompt_tokens=prompt, max_tokens=100, problem_id=f"p{i}")
        for i in range(len(answers))
    )
    ends = {i: End(request=i, status="finished", token_ids=list(answer)) for i, answer in enumerate(answers)}
    return Trace(header(batch), arrivals, (Step(at_ms=0.0, candidates=tuple(candidates)),), ends)


class ListSink:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.is_closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.is_closed = True


class ScriptedBudget(BaseBudget):
    """A budget that allows so many nodes, verifies all of them, and remembers every call."""

    def __init__(self, max_nodes: int = 2, max_depth: int = 2, *, off: Sequence[int] = (), drafters: int | None = None):
        """Args:
        off: calls of `steps_off` that are answered with 1.
        drafters: bits of those that are asked; None: all are.
        """
        super().__init__(max_nodes, max_depth)
        self.off, self.drafters = set(off), drafters
        self.calls: list[tuple[str, object]] = []
        self.asked = 0

    def of(self, name: str) -> list:
        return [what for call, what in self.calls if call == name]

    def steps_off(self, num_requests: int) -> int:
        self.asked += 1
        return int(self.asked - 1 in self.off)

    def limits(self, batch: RequestBatch) -> DraftLimits:
        self.calls.append(("limits", batch))
        limits = super().limits(batch)
        if self.drafters is None:
            return limits
        return replace(limits, drafters=np.full(batch.size, self.drafters, dtype=np.uint32))

    def choose(
        self, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, draft_ms: float
    ) -> StepPlan:
        self.calls.append(("choose", (proposals, draft_ms)))
        trees = merge_select(proposals, limits).trees
        return StepPlan(trees, "scripted", pays=bool(trees.num_nodes))

    def observe(self, record: StepRecord) -> None:
        self.calls.append(("observe", record))

    def finish(self, ending: Answer) -> None:
        self.calls.append(("finish", ending))
