"""Picking and judging nodes in C++ against their specification in policies/pick.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout.policies.pick import BUCKETS, DEPTHS, NAIVE, SOURCES, PickRequest, Prices
from vllm_specrollout.types import DraftTree, Feedback
from vllm_specrollout.worker.picking import CORE


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 64) -> DraftTree:
    n = draw(st.integers(0, max_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    near = draw(st.integers(1, 8))
    parents = [int(rng.integers(max(-1, i - near), i)) for i in range(n)]
    return DraftTree(
        rng.integers(0, 1000, n).astype(np.int32),
        np.asarray(parents, np.int32).reshape(n),
        np.log(rng.uniform(1e-4, 1.0, n)).astype(np.float32),
        rng.integers(0, SOURCES, n).astype(np.int32),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[DraftTree], PickRequest]:
    batch = draw(st.lists(trees(), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes, r = sum(tree.size for tree in batch), len(batch)
    rows = np.concatenate([[0.0], np.cumsum(rng.uniform(0.001, draw(st.sampled_from([0.01, 0.3, 3.0])), nodes))])
    scale = draw(st.sampled_from([0.0, 0.05, 1.0]))
    return batch, PickRequest(
        rng.uniform(0.1, 2.0, (SOURCES, BUCKETS)),
        rng.uniform(0.1, 1.5, (SOURCES, len(DEPTHS))),
        rng.uniform(0.05, 2.0, r),
        rng.uniform(0.01, 5.0, r),
        rng.random(r) < 0.3,
        rng.integers(0, 65, r),
        rng.integers(0, 20, r),
        Prices(rows, *(rng.uniform(0.0, 1.0, 3) * scale).tolist()),
        least_net=draw(st.sampled_from([0.0, 0.5])),
        probes=draw(st.integers(0, 3)),
    )


@settings(deadline=None)
@given(problems())
def test_the_same_nodes_are_picked_as_by_the_specification(problem: tuple[list[DraftTree], PickRequest]) -> None:
    batch, request = problem
    expected, found = NAIVE.pick(batch, request), CORE.pick(batch, request)
    for field in ("tokens", "gain", "cost", "net"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-9, abs=1e-9)
    for one, other in zip(expected.trees, found.trees, strict=True):
        for column in ("token_ids", "parents", "log_q", "source"):
            np.testing.assert_array_equal(getattr(one, column), getattr(other, column))
            assert getattr(one, column).dtype == getattr(other, column).dtype


@settings(deadline=None)
@given(st.lists(trees(), max_size=8), st.integers(0, 2**32))
def test_the_same_nodes_count_as_reached(batch: list[DraftTree], seed: int) -> None:
    rng = np.random.default_rng(seed)
    feedback = []
    for tree in batch:
        path: list[int] = []
        children = [i for i, p in enumerate(tree.parents) if p == -1]
        while children and rng.random() < 0.7:
            path.append(int(rng.choice(children)))
            children = [i for i, p in enumerate(tree.parents) if p == path[-1]]
        nodes = np.asarray(path, np.int32).reshape(-1)
        feedback.append(Feedback("r", tree.size, len(path), tree.parents, tree.source, tree.log_q, nodes))
    expected, found = NAIVE.reached(feedback), CORE.reached(feedback)
    for field in dataclasses.fields(expected):
        one, other = getattr(expected, field.name), getattr(found, field.name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other) if one.dtype == np.int64 else np.testing.assert_allclose(one, other)


def test_bad_input_is_refused() -> None:
    tree = DraftTree(
        np.zeros(2, np.int32), np.asarray([-1, 1], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32)
    )
    request = PickRequest(
        np.ones((SOURCES, BUCKETS)),
        np.ones((SOURCES, len(DEPTHS))),
        np.ones(1),
        np.ones(1),
        np.zeros(1, np.bool_),
        np.full(1, 64),
        np.full(1, 64),
        Prices(np.arange(3.0)),
    )
    with pytest.raises(ValueError, match="has parent 1, which does not come before it"):
        CORE.pick([tree], request)
    sound = dataclasses.replace(tree, parents=np.asarray([-1, 0], np.int32))
    with pytest.raises(ValueError, match="price for every node"):
        CORE.pick([sound], dataclasses.replace(request, prices=Prices(np.arange(2.0))))
    with pytest.raises(ValueError, match="worth has 1 entries instead of 2"):
        CORE.pick([sound, sound], dataclasses.replace(request, by_request=np.ones(2)))
    with pytest.raises(ValueError, match="source"):
        CORE.pick([dataclasses.replace(sound, source=np.full(2, 99, np.int32))], request)
