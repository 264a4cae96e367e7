"""Flat draft trees for tests, from parents or tokens written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from vllm_specrollout.types import DraftLimits, DraftTree, IntArray, TreeBatch


def chain(token_ids: IntArray | list[int], source: int = 0, probability: float = 1.0) -> DraftTree:
    """A draft without branches: node i hangs on node i - 1."""
    n = len(token_ids)
    return DraftTree(
        np.asarray(token_ids, dtype=np.int32),
        np.arange(-1, n - 1, dtype=np.int32),
        np.full(n, np.log(max(probability, 1e-9)), dtype=np.float32),
        np.full(n, source, dtype=np.int32),
    )


def batch_of(trees: Sequence[DraftTree], request_ids: Sequence[str] | None = None) -> TreeBatch:
    """Trees behind one another."""
    ids = [str(i) for i in range(len(trees))] if request_ids is None else request_ids
    start = np.cumsum([0, *(tree.size for tree in trees)], dtype=np.int32)
    depth: list[int] = []
    for tree in trees:
        own: list[int] = []
        for parent in tree.parents.tolist():
            own.append(1 if parent < 0 else own[parent] + 1)
        depth += own

    def column(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(getattr(tree, name) for tree in trees)]).astype(dtype)

    return TreeBatch(
        ids,
        start,
        column("token_ids", np.int32),
        column("parents", np.int32),
        column("log_q", np.float32),
        column("source", np.int32),
        np.asarray(depth, dtype=np.int32),
    )


def limits_of(
    count: int, max_nodes: int | Sequence[int] = 64, max_depth: int = 64, is_chain: bool | Sequence[bool] = False
) -> DraftLimits:
    """The same limits for all, unless told one by one."""
    return DraftLimits(
        np.broadcast_to(np.asarray(max_nodes, np.int32), count).copy(),
        np.full(count, max_depth, np.int32),
        np.broadcast_to(np.asarray(is_chain, np.bool_), count).copy(),
    )


def tree_of(
    parents: Sequence[int], tokens: Sequence[int], probabilities: Sequence[float], source: int = 0
) -> DraftTree:
    n = len(parents)
    log_q = np.log(np.maximum(np.asarray(probabilities, np.float64), 1e-9)).astype(np.float32)
    return DraftTree(
        np.asarray(tokens, np.int32).reshape(n), np.asarray(parents, np.int32).reshape(n), log_q.reshape(n),
        np.full(n, source, np.int32),
    )  # fmt: skip


@st.composite
def drafted(draw: st.DrawFn, source: int = 0, max_nodes: int = 12, vocabulary: int = 4) -> DraftTree:
    """A drafter's tree: few tokens, so that drafters agree now and then; siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for i in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, i - 1))
        taken = {token for other, token in zip(parents, tokens, strict=True) if other == parent}
        free = [token for token in range(vocabulary) if token not in taken]
        if not free:
            break
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
    words = draw(st.lists(st.floats(0.001, 1.0), min_size=len(parents), max_size=len(parents)))
    return tree_of(parents, tokens, words, source)


@st.composite
def proposed(draw: st.DrawFn, most_requests: int = 4, most_drafters: int = 3) -> list[TreeBatch]:
    """What several drafters propose for one batch."""
    count, drafters = draw(st.integers(1, most_requests)), draw(st.integers(1, most_drafters))
    return [batch_of([draw(drafted(source)) for _ in range(count)]) for source in range(drafters)]
