"""A small engine that tells listeners what a speculator tells them, in the order of either model runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.drafters import nothing_accepted
from tests.trees import batch_of, tree_of
from vllm_specrollout.budgets.fixed import FixedBudget
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import (
    EMPTY_TREE,
    Answer,
    DraftLimits,
    DraftTree,
    FinishReason,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    VerifyResult,
    empty_trees,
)

PROMPT = 10
MOST_TOKENS = 100


def view(request_id: str, tokens: Sequence[int], most: int = MOST_TOKENS, **values: object) -> RequestView:
    """A request that has generated these tokens and may have `most` in all."""
    token_ids = np.asarray([0] * PROMPT + list(tokens), dtype=np.int32)
    return RequestView(request_id, token_ids, PROMPT, most - len(tokens), problem_id="p", **values)


def ending(request_id: str, tokens: Sequence[int], status: FinishReason = FinishReason.FINISHED) -> Answer:
    return Answer(request_id, "p", np.zeros(PROMPT, np.int32), np.asarray(tokens, dtype=np.int32), status)


def walk(tree: DraftTree, truth: Sequence[int]) -> list[int]:
    """The nodes that the target accepts."""
    path, node = [], -1
    for token in truth:
        child = [i for i in range(tree.size) if tree.parents[i] == node and tree.token_ids[i] == token]
        if not child:
            break
        path += child
        node = child[0]
    return path


def record_of(
    trees: TreeBatch, accepted: Sequence[Sequence[int]] = (), plan: StepPlan | None = None, **values: object
) -> StepRecord:
    """A step that verified these trees; `accepted` has the accepted nodes of each request."""
    result = nothing_accepted(0)
    if trees.num_nodes:
        flat = [node for own in accepted for node in own]
        result = VerifyResult(np.asarray([len(own) for own in accepted], np.int32), np.asarray(flat, np.int32))
    return StepRecord(plan, trees, result, **values)


def timing_of(nodes: int = 0, ms: float = 10.0, batch: int = 2, **values: object) -> StepTiming:
    facts = {"branches": 0, "tokens": batch, "is_decode_only": True, **values}
    return StepTiming(batch=batch, rows=batch + nodes, nodes=nodes, step_ms=ms, **facts)


@dataclass
class Rollout:
    """Answers that are all in the batch from the start, drafted for by a drafter that is right three times of four.

    Every engine step takes `step_ms`, drafting included. On the V1 runner (`is_late`) a step's record comes after the
    plan of the next one, and a request's end before the record of its last step.
    """

    answers: Mapping[str, Sequence[int]]
    listener: Listener
    is_late: bool
    budget: FixedBudget = field(default_factory=lambda: FixedBudget(4, 3))
    # numbers of the steps that go without drafts
    pauses: frozenset[int] = frozenset()
    step_ms: float = 10.0
    draft_ms: float = 1.0
    now_ms: float = 0.0
    # per step: draft nodes verified, and accepted
    nodes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_ms / 1e3

    def run(self) -> Rollout:
        lengths = dict.fromkeys(self.answers, 0)
        next_plan: StepPlan | None = None
        made_from: tuple[RequestBatch, list[TreeBatch]] | None = None
        late: Callable[[], None] | None = None
        while lengths:
            step, is_first = len(self.nodes), not self.nodes
            plan, self.now_ms = next_plan, self.now_ms + self.step_ms - self.draft_ms
            record = self._verify(plan, made_from, lengths)
            if late is not None:
                late()
            over = [name for name in lengths if lengths[name] >= len(self.answers[name])]

            def tell(record: StepRecord = record) -> None:
                self.listener.stepped(record)

            if not self.is_late:
                tell()
                self._end(over, lengths)
            if is_first:
                for name, length in lengths.items():
                    self.listener.admitted(self._view(name, length))
            next_plan, made_from = None, None
            if lengths and step + 1 in self.pauses:
                self.listener.paused(len(lengths), "drafts do not pay")
            self.now_ms += self.draft_ms
            if lengths and step + 1 not in self.pauses:
                next_plan, made_from = self._plan(lengths)
            if self.is_late:
                self._end(over, lengths)
                late = tell
        if late is not None:
            late()
        self.listener.closed()
        return self

    def _view(self, name: str, length: int) -> RequestView:
        return view(name, self.answers[name][:length])

    def _end(self, names: Sequence[str], lengths: dict[str, int]) -> None:
        for name in names:
            del lengths[name]
            self.listener.finished(ending(name, self.answers[name]))

    def _plan(self, lengths: Mapping[str, int]) -> tuple[StepPlan, tuple[RequestBatch, list[TreeBatch]]]:
        batch = RequestBatch.of([self._view(name, length) for name, length in lengths.items()])
        limits = self.budget.limits(batch)
        trees = [self._proposed(name, lengths[name], limits, i) for i, name in enumerate(lengths)]
        proposals = [batch_of(trees, list(lengths))]
        plan = self.budget.choose(proposals, limits, batch, self.draft_ms)
        self.listener.planned(batch, limits, proposals, plan, self.draft_ms)
        return plan, (batch, proposals)

    def _proposed(self, name: str, length: int, limits: DraftLimits, i: int) -> DraftTree:
        """The next tokens, one in four of them wrong, each with a sibling that is right where the token is not."""
        tokens: list[int] = []
        parents: list[int] = []
        for depth, token in enumerate(self.answers[name][length : length + int(limits.max_depth[i])]):
            is_wrong = (length + depth) % 4 == 3
            parent = -1 if not depth else 2 * depth - 2
            tokens += [token + 1000 if is_wrong else token, token if is_wrong else token + 2000]
            parents += [parent, parent]
        most = int(limits.max_nodes[i])
        return tree_of(parents[:most], tokens[:most], [0.7 if n % 2 == 0 else 0.2 for n in range(len(tokens[:most]))])

    def _verify(
        self,
        plan: StepPlan | None,
        made_from: tuple[RequestBatch, list[TreeBatch]] | None,
        lengths: dict[str, int],
    ) -> StepRecord:
        drafted: dict[str, DraftTree] = {}
        if plan is not None:
            drafted = {name: plan.trees.tree(i) for i, name in enumerate(plan.trees.request_ids)}
        trees = [drafted.get(name, EMPTY_TREE) for name in lengths]
        paths = [walk(t, self.answers[n][lengths[n] :]) for n, t in zip(lengths, trees, strict=True)]
        for name, path in zip(lengths, paths, strict=True):
            lengths[name] = min(lengths[name] + len(path) + 1, len(self.answers[name]))
        flat = batch_of(trees, list(lengths)) if drafted else empty_trees(list(lengths))
        self.nodes.append(flat.num_nodes)
        self.accepted.append(sum(map(len, paths)))
        timing = timing_of(flat.num_nodes, self.step_ms, len(lengths), is_decode_only=len(self.nodes) > 1)
        batch, proposals = made_from if made_from is not None else (None, [])
        return record_of(flat, paths, plan, timing=timing, batch=batch, proposals=proposals)
