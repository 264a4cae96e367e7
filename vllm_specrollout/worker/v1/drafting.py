"""From the runner's batch to draft trees for the next step, and from verdicts to feedback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import DraftTokenIds

from vllm_specrollout import _core
from vllm_specrollout.step import Speculation
from vllm_specrollout.trees.build import first_nodes, is_chain
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import (
    EMPTY_TREE,
    Decision,
    DraftTree,
    IntArray,
    RequestView,
    Shape,
    StepTiming,
    chain,
)
from vllm_specrollout.worker.stats import feedback_of


@dataclass(slots=True)
class Pending:
    """A tree on its way through the scheduler, which may cut it to its first n tokens."""

    tree: DraftTree
    token_ids: list[int]
    is_chain: bool


@dataclass(slots=True)
class StepDrafts:
    """The drafts that the scheduler put into the step in progress, in batch order."""

    # [R] EMPTY_TREE where there is no draft
    trees: list[DraftTree]
    # [R + 1] first node of each request
    node_start: IntArray
    # [nodes] of all trees behind one another
    parents: IntArray
    token_ids: IntArray
    has_branches: bool


class Drafting:
    """Keeps the trees between the step that drafts them and the step that verifies them."""

    def __init__(
        self, speculation: Speculation, num_scratch: int, block_size: int, max_nodes: int | None = None
    ) -> None:
        """Args:
        num_scratch: blocks that branches may take, all requests together.
        max_nodes: drafts that a step may have, all requests together; None: as many as there are.
        """
        self.speculation = speculation
        self.num_scratch = num_scratch
        self.block_size = block_size
        self.max_nodes = max_nodes
        self._pending: dict[str, Pending] = {}

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self.speculation.forget(request_id)

    def scheduled(self, request_ids: Sequence[str], scheduled: dict[str, list[int]]) -> StepDrafts:
        """The trees behind the scheduled draft tokens. Tokens we know no tree for are a chain: lossless anyway."""
        trees = [EMPTY_TREE] * len(request_ids)
        counts = np.zeros(len(request_ids) + 1, dtype=np.int32)
        has_branches = False
        for i, request_id in enumerate(request_ids):
            own = scheduled.get(request_id)
            if not own:
                continue
            n = counts[i + 1] = len(own)
            pending = self._pending.get(request_id)
            if pending is not None and pending.token_ids[:n] == own:
                trees[i] = first_nodes(pending.tree, n)
                has_branches = has_branches or not pending.is_chain
            else:
                trees[i] = chain(own)
        return StepDrafts(
            trees,
            np.cumsum(counts, dtype=np.int32),
            np.concatenate([tree.parents for tree in trees]),
            np.concatenate([tree.token_ids for tree in trees]),
            has_branches,
        )

    def settle(
        self,
        request_ids: Sequence[str],
        drafts: StepDrafts | None,
        num_accepted: IntArray | None,
        accepted: IntArray | None,
        timing: StepTiming | None,
    ) -> None:
        """Report what became of the drafts, and what the step before cost."""
        with self.speculation.guard.over("learning", "what became of such a step's drafts is not learned from"):
            verified: list[tuple[str, DraftTree, IntArray]] = []
            if drafts is not None and num_accepted is not None and accepted is not None:
                at = 0
                for request_id, tree, count in zip(request_ids, drafts.trees, num_accepted.tolist(), strict=True):
                    verified.append((request_id, tree, accepted[at : at + count]))
                    at += count
            self.speculation.settle(feedback_of(verified, len(request_ids)), timing)

    def prepare(self, see: Callable[[], Sequence[RequestView]], num_ranks: int) -> tuple[DraftTokenIds, float]:
        """Trees for the next step; returns the tokens for the scheduler and the milliseconds spent.

        With several tensor-parallel ranks the first one drafts: clocks differ between ranks, and a tree must not. It
        tells the others whatever happens, since they wait for it.

        Args:
            see: makes the views of the requests that may be drafted for; none where there is none, or drafting rests.
        """
        trees: dict[str, DraftTree] = {}
        begin: float | None = None
        group = get_tp_group() if num_ranks > 1 else None
        if group is None or group.rank_in_group == 0:
            with self.speculation.guard.over("drafting", "requests go on without drafts in such a step"):
                if views := see():
                    begin = time.perf_counter()
                    trees = self._drafted(views)
        if group is not None:
            trees = group.broadcast_object(trees, src=0)
        request_ids: list[str] = []
        tokens: list[list[int]] = []
        for request_id, tree in trees.items():
            own = tree.token_ids.tolist()
            self._pending[request_id] = Pending(tree, own, is_chain(tree))
            request_ids.append(request_id)
            tokens.append(own)
        spent_ms = 0.0 if begin is None else (time.perf_counter() - begin) * 1e3
        return DraftTokenIds(request_ids, tokens), spent_ms

    def _drafted(self, views: Sequence[RequestView]) -> dict[str, DraftTree]:
        """The trees of those requests that have one, as many nodes and branches of them as there is room for."""
        trees = self._within_scratch(views, self._within_nodes(self.speculation.prepare(views)))
        return {view.request_id: tree for view, tree in zip(views, trees, strict=True) if tree.size}

    def _within_nodes(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Cuts trees to equal shares where they are too many nodes together; a tree's beginning is its best part."""
        if self.max_nodes is None or sum(tree.size for tree in trees) <= self.max_nodes:
            return trees
        share = self.max_nodes // sum(tree.size > 0 for tree in trees)
        return [first_nodes(tree, share) for tree in trees]

    def _within_scratch(self, views: Sequence[RequestView], trees: list[DraftTree]) -> list[DraftTree]:
        """Cuts trees to their best path where the scratch blocks would not suffice."""
        free = self.num_scratch
        for i, (view, tree) in enumerate(zip(views, trees, strict=True)):
            if not tree.size or is_chain(tree):
                continue
            needed = _core.scratch_needed(tree.parents, len(view.token_ids) - 1, self.block_size)
            if needed > free:
                trees[i] = prune(tree, Decision(tree.size, tree.size, Shape.CHAIN))
            else:
                free -= needed
        return trees
