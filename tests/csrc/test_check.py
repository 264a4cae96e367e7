"""What the C++ core takes for a tree is what `trees.build.check` does, and nothing it is given brings it down."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout import _core
from vllm_specrollout.policies.pick import BUCKETS, DEPTHS, SOURCES, PickRequest, Prices
from vllm_specrollout.trees import build
from vllm_specrollout.types import EMPTY_TREE, DraftTree, chain
from vllm_specrollout.worker.picking import CORE

ODD = st.sampled_from([0.0, -0.0, 1e-30, 1.0, 100.0, -1e30, math.inf, -math.inf, math.nan])
VOCAB = 8


@st.composite
def any_trees(draw: st.DrawFn) -> DraftTree:
    """Mostly trees, often with something wrong in one place."""
    size = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in range(size)]
    log_q = [draw(st.floats(-5.0, 0.0, width=32)) for _ in range(size)]
    source = [draw(st.integers(0, SOURCES - 1)) for _ in range(size)]
    if size and draw(st.booleans()):
        at = draw(st.integers(0, size - 1))
        fault = draw(st.sampled_from(["parent", "token", "log_q", "source"]))
        if fault == "parent":
            parents[at] = draw(st.sampled_from([at, at + 1, 1 << 30, -2, -(1 << 31)]))
        elif fault == "token":
            tokens[at] = draw(st.sampled_from([-1, VOCAB, (1 << 31) - 1, -(1 << 31)]))
        elif fault == "log_q":
            log_q[at] = draw(ODD)
        else:
            source[at] = draw(st.sampled_from([-1, SOURCES, 1 << 30]))
    return DraftTree(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.asarray(log_q, np.float32),
        np.asarray(source, np.int32),
    )


def _is_sound(tree: DraftTree) -> bool:
    """By the specification, but for equal siblings, which are a waste and no mistake."""
    distinct = DraftTree(np.arange(tree.size, dtype=np.int32), tree.parents, tree.log_q, tree.source)
    try:
        build.check(distinct)
    except ValueError:
        return False
    tokens, source = tree.token_ids.tolist(), tree.source.tolist()
    return all(0 <= token < VOCAB for token in tokens) and all(0 <= one < SOURCES for one in source)


@settings(max_examples=500, deadline=None)
@given(st.lists(any_trees(), max_size=4))
def test_what_is_refused_is_what_is_no_tree(trees: list[DraftTree]) -> None:
    if all(map(_is_sound, trees)):
        unordered = _core.check_trees(trees, VOCAB)
        for i, tree in enumerate(trees):
            total = build.cumulative_log_q(tree)
            rises = [b - a for a, b in zip(total, total[1:], strict=False)]
            assert (i in unordered) == any(rise > 1e-4 for rise in rises)
    else:
        first = next(i for i, tree in enumerate(trees) if not _is_sound(tree))
        with pytest.raises(ValueError, match=f"^tree {first}: node"):
            _core.check_trees(trees, VOCAB)


@pytest.mark.parametrize(
    "column, value",
    [
        ("token_ids", np.zeros(2, np.int64)),
        ("token_ids", np.zeros((2, 1), np.int32)),
        ("parents", np.zeros(3, np.int32)),
        ("log_q", np.zeros(4, np.float32)[::2]),
        ("source", [0, 0]),
    ],
)
def test_columns_of_another_type_or_length_are_refused(column: str, value: object) -> None:
    columns = {name: getattr(chain([1, 2]), name) for name in ("token_ids", "parents", "log_q", "source")}
    with pytest.raises(ValueError, match=column):
        _core.check_trees([EMPTY_TREE, DraftTree(**{**columns, column: value})], VOCAB)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(any_trees(), st.lists(ODD, min_size=6, max_size=6))
def test_picking_survives_numbers_that_are_none(tree: DraftTree, odd: list[float]) -> None:
    bucket, depth, request, worth, price, least = odd
    with np.errstate(invalid="ignore"):
        rows = np.arange(8.0) * price
    asked = PickRequest(
        np.full((SOURCES, BUCKETS), bucket),
        np.full((SOURCES, len(DEPTHS)), depth),
        np.full(1, request),
        np.full(1, worth),
        np.zeros(1, np.bool_),
        np.full(1, 64),
        np.full(1, 64),
        Prices(rows, draft=price, tree=price, branch=price),
        least_net=least,
        probes=2,
    )
    try:
        picked = CORE.pick([tree], asked)
    except ValueError as error:
        assert str(error).startswith("node"), "what is no tree is refused, and that is all"
    else:
        assert picked.num_nodes <= tree.size
