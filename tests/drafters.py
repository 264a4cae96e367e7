"""Drafters and requests of a few lines, for tests of whatever stands around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.trees import batch_of, tree_of
from vllm_specrollout.budgets.base import bounded
from vllm_specrollout.drafters.base import BaseDrafter, Drafter
from vllm_specrollout.types import (
    EMPTY_TREE,
    Answer,
    DraftLimits,
    DraftTree,
    RequestBatch,
    RequestView,
    TreeBatch,
    VerifyResult,
)


class Says(BaseDrafter):
    """Always proposes one chain, as far as the limits allow."""

    def __init__(self, name: str, tokens: Sequence[int], probability: float = 0.5, source: int = 0) -> None:
        self.name, self.source = name, source
        self.tree = tree_of(range(-1, len(tokens) - 1), tokens, [probability] * len(tokens), source)
        self.admitted: list[str] = []
        self.asked: list[list[str]] = []
        self.heard: list[tuple[TreeBatch, VerifyResult]] = []
        self.finished: list[Answer] = []
        self.forgotten: list[str] = []

    def admit(self, view: RequestView) -> None:
        self.admitted.append(view.request_id)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        self.asked.append(list(batch.request_ids))
        return self.answer(batch, limits)

    def answer(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        trees: list[DraftTree] = []
        for most in limits.wanted(self.source).tolist():
            tree = self.tree
            kept = DraftTree(tree.token_ids[:most], tree.parents[:most], tree.log_q[:most], tree.source[:most])
            trees.append(kept if most else EMPTY_TREE)
        return batch_of(trees, batch.request_ids)

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        self.heard.append((trees, result))

    def finish(self, ending: Answer) -> None:
        self.finished.append(ending)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def views_of(count: int, num_tokens: int = 3) -> list[RequestView]:
    return [RequestView(str(i), np.zeros(num_tokens, np.int32), 1, 50) for i in range(count)]


def requests_of(count: int, num_tokens: int = 3) -> RequestBatch:
    return RequestBatch.of(views_of(count, num_tokens))


def nothing_accepted(count: int) -> VerifyResult:
    return VerifyResult(np.zeros(count, np.int32), np.zeros(0, np.int32))


class TreeByTree(BaseDrafter):
    """A drafter that thinks of one request at a time."""

    name = "tree by tree"

    def tree(self, view: RequestView, max_nodes: int, max_depth: int, is_chain: bool) -> DraftTree:
        raise NotImplementedError

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        bounds = (limits.max_nodes.tolist(), limits.max_depth.tolist(), limits.is_chain.tolist())
        trees = [self.tree(view, *own) for view, *own in zip(batch.views, *bounds, strict=True)]
        return batch_of(trees, batch.request_ids)


def ask(
    drafter: Drafter, views: Sequence[RequestView], max_nodes: int = 16, max_depth: int = 8, *, is_chain: bool = False
) -> list[DraftTree]:
    """One tree per view, as a drafter answers at once."""
    batch = RequestBatch.of(views)
    trees = drafter.propose(batch, bounded(batch, max_nodes, max_depth, is_chain=is_chain))
    assert isinstance(trees, TreeBatch) and trees.num_requests == len(views)
    return [trees.tree(i) for i in range(len(views))]
