"""The rows of a step's trees against the naive twin, and what is no step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.tree_rows import laid_out
from tests.trees import batch_of, drafted, tree_of
from vllm_specrollout import _core
from vllm_specrollout.types import ROOT, TreeBatch


def _starts(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _laid_out(trees: TreeBatch, order: list[int], logits_rows: list[int], rows: list[int]) -> dict[str, Any]:
    nodes = sum(int(trees.sizes[tree]) for tree in order if tree >= 0)
    out = {
        "parents": np.zeros(sum(logits_rows), np.int32),
        "tokens": np.zeros(nodes, np.int32),
        "shift": np.zeros(sum(rows), np.int32),
        "nodes": np.zeros(nodes, np.int64),
        "sizes": np.zeros(len(order), np.int32),
        "ancestors": np.zeros(sum(rows), np.uint64),
    }
    starts = (np.asarray(order, np.int32), _starts(logits_rows), _starts(rows))
    _core.tree_rows(trees.node_start, trees.parents, trees.depth, trees.token_ids, *starts, *out.values())
    return {name: column.tolist() for name, column in out.items()}


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Any], list[int], list[int], list[int]]:
    """Trees; which request of a batch has which; rows of logits and rows of each, of prompts some more."""
    trees = draw(st.lists(drafted(), max_size=5))
    order = draw(st.permutations([*range(len(trees)), *[-1] * draw(st.integers(0 if trees else 1, 3))]))
    logits = [1 + (trees[tree].size if tree >= 0 else 0) for tree in order]
    return trees, order, logits, [count + draw(st.integers(0, 4)) for count in logits]


@given(steps())
def test_each_requests_nodes_lie_at_the_end_of_its_rows(
    step: tuple[list[Any], list[int], list[int], list[int]],
) -> None:
    trees, order, logits, rows = step
    wanted = laid_out([trees[tree] if tree >= 0 else None for tree in order], logits, rows)
    assert _laid_out(batch_of(trees), order, logits, rows) == wanted


FORK = batch_of([tree_of([ROOT, ROOT], [1, 2], [0.5, 0.4])])


@pytest.mark.parametrize(
    ("trees", "order", "logits", "rows", "cause"),
    [
        (FORK, [0], [3], [2], "fewer rows than its tree"),
        (FORK, [0], [2], [3], "fewer rows than its tree"),
        (FORK, [0, 1], [3, 1], [3, 1], "order must name trees"),
        (batch_of([tree_of([ROOT] * 65, range(65), [0.01] * 65)]), [0], [66], [66], "more nodes than a mask has bits"),
    ],
)
def test_a_step_that_does_not_hold_its_trees_is_refused(
    trees: TreeBatch, order: list[int], logits: list[int], rows: list[int], cause: str
) -> None:
    columns = (trees.node_start, trees.parents, trees.depth, trees.token_ids)
    places = (np.asarray(order, np.int32), _starts(logits), _starts(rows))
    nodes = sum(int(trees.sizes[tree]) for tree in order if tree < trees.num_requests)
    out = [np.zeros(count, np.int32) for count in (sum(logits), nodes, sum(rows))]
    masks = np.zeros(sum(rows), np.uint64)
    with pytest.raises(ValueError, match=cause):
        _core.tree_rows(*columns, *places, *out, np.zeros(nodes, np.int64), np.zeros(len(order), np.int32), masks)
