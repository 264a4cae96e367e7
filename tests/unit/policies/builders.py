"""Views, trees and feedback as the engine would hand them over; shared by the budgets' tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.trees.build import order, path_to
from vllm_specrollout.types import DraftTree, Feedback, RequestView, StepTiming, chain


def view(name: str = "r", **kwargs: object) -> RequestView:
    """A request early in its answer."""
    return RequestView(**{"request_id": name, "token_ids": np.zeros(4, np.int32), "num_prompt_tokens": 2,
                          "max_new_tokens": 100, **kwargs})  # fmt: skip


def views(batch: int, **kwargs: object) -> list[RequestView]:
    return [view(f"r{i}", **kwargs) for i in range(batch)]


def star_of_chains(width: int, depth: int, probability: float = 0.8) -> DraftTree:
    """`width` chains that all start at the root, the first ones more probable."""
    token_ids, parents, log_q = [], [], []
    for i in range(width):
        for level in range(depth):
            parents.append(len(parents) - 1 if level else -1)
            token_ids.append(100 * i + level)
            log_q.append(np.log(probability / (i + 1)))
    return order(
        DraftTree(
            np.asarray(token_ids, np.int32),
            np.asarray(parents, np.int32),
            np.asarray(log_q, np.float32),
            np.zeros(len(parents), np.int32),
        )
    )


def feedback(drafted: int, accepted: int, name: str = "r") -> Feedback:
    """Of a chain."""
    tree = chain(list(range(drafted)))
    return Feedback(name, drafted, accepted, tree.parents, tree.source, tree.log_q, np.arange(accepted, dtype=np.int32))


def feedback_of(tree: DraftTree, node: int, name: str = "r", batch: int = 1) -> Feedback:
    """Of a tree whose target walked down to `node` (-1: nowhere)."""
    path = np.asarray(path_to(tree.parents, node), dtype=np.int32)
    return Feedback(name, tree.size, len(path), tree.parents, tree.source, tree.log_q, path, batch)


def timing(batch: int, nodes: int, ms: float, *, tokens: int | None = None, **kwargs: object) -> StepTiming:
    """A decode step."""
    return StepTiming(batch, batch + nodes, nodes, 0, batch if tokens is None else tokens, ms, True,
                      **{"trees": batch if nodes else 0, **kwargs})  # fmt: skip


def most_children(trees: Sequence[DraftTree]) -> int:
    counts = [np.unique(tree.parents, return_counts=True)[1].max() for tree in trees if tree.size]
    return int(max(counts, default=0))
