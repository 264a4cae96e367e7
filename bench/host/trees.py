"""What the host benchmarks share: bushy trees, a drafter that has them ready, and requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.trees import batch_of
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.trees.build import order
from vllm_specrollout.types import DraftLimits, DraftTree, RequestBatch, RequestView, TreeBatch

BLOCK = 32


def bushy(rng: np.random.Generator, nodes: int, source: int = 0, tokens: int = 0) -> DraftTree:
    """A tree with two children for the likely nodes; its tokens are drawn from so many, so that drafters may agree."""
    parents = [-1, *(int(rng.integers(max(-1, i // 2 - 1), i)) for i in range(1, nodes))]
    return order(
        DraftTree(
            (rng.permutation(nodes) % (tokens or nodes)).astype(np.int32),
            np.asarray(parents, np.int32),
            np.log(rng.uniform(0.2, 0.9, nodes)).astype(np.float32),
            np.full(nodes, source, np.int32),
        )
    )


class Ready(BaseDrafter):
    """A drafter whose trees are ready, so that only their way is timed."""

    name = "ready"

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self.trees = batch_of(trees)

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        return self.trees


def views(lengths: Sequence[int] | np.ndarray) -> list[RequestView]:
    """Requests with so many tokens."""
    return [RequestView(str(i), np.zeros(int(n), np.int32), 8, 500) for i, n in enumerate(lengths)]
