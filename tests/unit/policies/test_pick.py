"""The choice among all nodes: within its own model never worse than simpler rules, and close to the best there is."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_specrollout.policies.pick import BUCKETS, DEPTHS, NAIVE, SOURCES, PickRequest, Prices, cost_of, pick
from vllm_specrollout.trees.build import check, select
from vllm_specrollout.types import DraftTree

KEEP_ALL = {"by_bucket": np.ones((SOURCES, BUCKETS)), "by_depth": np.ones((SOURCES, len(DEPTHS)))}


def make_tree(parents: list[int], q: list[float]) -> DraftTree:
    n = len(parents)
    return DraftTree(
        np.arange(100, 100 + n, dtype=np.int32),
        np.asarray(parents, np.int32),
        np.log(np.asarray(q, np.float32)),
        np.zeros(n, np.int32),
    )


def make_request(worth: list[float], rows: np.ndarray, **prices: float) -> PickRequest:
    n = len(worth)
    return PickRequest(
        **KEEP_ALL,
        by_request=np.ones(n),
        worth=np.asarray(worth, np.float64),
        is_chain=np.zeros(n, np.bool_),
        max_nodes=np.full(n, 64),
        max_depth=np.full(n, 64),
        prices=Prices(rows, **prices),
    )


@st.composite
def small_problems(draw: st.DrawFn, max_nodes: int = 5) -> tuple[list[DraftTree], PickRequest]:
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, max_nodes))
        parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
        q = [draw(st.floats(0.05, 0.99)) for _ in range(n)]
        trees.append(make_tree(parents, q))
    steps = draw(st.lists(st.floats(0.01, 0.6), min_size=16, max_size=16))
    rows = np.concatenate([[0.0], np.cumsum(sorted(steps) if draw(st.booleans()) else steps)])
    worth = [draw(st.floats(0.1, 3.0)) for _ in trees]
    has_extra = draw(st.booleans())
    extra = {name: draw(st.floats(0.0, 0.3)) if has_extra else 0.0 for name in ("draft", "tree", "branch")}
    return trees, make_request(worth, rows, **extra)


def net_of(trees: list[DraftTree], keep: list[list[int]], request: PickRequest) -> float:
    """Gain less cost of these nodes."""
    gain = 0.0
    for tree, own, worth in zip(trees, keep, request.worth.tolist(), strict=True):
        reach: list[float] = []
        for parent, log_q in zip(tree.parents.tolist(), tree.log_q.tolist(), strict=True):
            p = min(float(np.exp(np.float64(log_q))), 0.995)
            reach.append(p if parent < 0 else reach[parent] * p)
        gain += worth * sum(reach[node] for node in own)
    kept = [select(tree, own) for tree, own in zip(trees, keep, strict=True)]
    return gain - cost_of(kept, request.prices)


def subtrees(tree: DraftTree) -> list[list[int]]:
    """All sets of nodes that hold the parent of each of their nodes."""
    sets = []
    parents = tree.parents.tolist()
    for bits in itertools.product((False, True), repeat=tree.size):
        own = [node for node, kept in enumerate(bits) if kept]
        if all(parents[node] < 0 or parents[node] in own for node in own):
            sets.append(own)
    return sets


def best_by_trying(trees: list[DraftTree], request: PickRequest) -> float:
    return max(net_of(trees, list(keep), request) for keep in itertools.product(*map(subtrees, trees)))


@settings(deadline=None)
@given(small_problems(max_nodes=4))
def test_where_only_rows_cost_no_other_choice_is_better(problem: tuple[list[DraftTree], PickRequest]) -> None:
    trees, request = problem
    bare = make_request(request.worth.tolist(), request.prices.rows, draft=request.prices.draft)
    found = pick(trees, bare)
    # single precision ranks; what ties there may differ in double
    assert found.net == pytest.approx(max(best_by_trying(trees, bare), 0.0), abs=1e-5)


@settings(deadline=None)
@given(small_problems(max_nodes=4))
def test_never_worse_than_none_than_uniform_sizes_than_one_request_at_a_time(
    problem: tuple[list[DraftTree], PickRequest],
) -> None:
    trees, request = problem
    found = pick(trees, request)
    assert found.net >= 0.0
    prefixes = [[list(range(min(size, tree.size))) for tree in trees] for size in range(6)]
    bare = make_request(request.worth.tolist(), request.prices.rows, draft=request.prices.draft)
    assert pick(trees, bare).net >= max(net_of(trees, keep, bare) for keep in prefixes) - 1e-5


@settings(deadline=None)
@given(small_problems())
def test_what_is_kept_is_a_tree_and_its_figures_are_those_of_what_is_kept(
    problem: tuple[list[DraftTree], PickRequest],
) -> None:
    trees, request = problem
    found = pick(trees, request)
    keep = []
    for kept in found.trees:
        check(kept)
        keep.append([int(token) - 100 for token in kept.token_ids])
    assert found.gain - found.cost == pytest.approx(net_of(trees, keep, request), abs=1e-6)
    assert found.net == pytest.approx(max(found.gain - found.cost, 0.0), abs=1e-9)


def test_branches_that_cost_more_than_they_bring_are_left_out() -> None:
    fork = make_tree([-1, -1], [0.6, 0.3])
    rows = np.asarray([0.0, 0.1, 0.2])
    assert pick([fork], make_request([1.0], rows)).trees[0].size == 2
    assert pick([fork], make_request([1.0], rows, branch=0.25)).trees[0].size == 1


def test_a_branch_may_be_paid_for_by_what_hangs_on_it() -> None:
    """0.3 alone does not pay for 0.1 + 0.25, but 0.3 + 0.29 + 0.28 does for 0.3 + 0.25."""
    tree = make_tree([-1, -1, 1, 2], [0.6, 0.3, 0.97, 0.97])
    rows = np.arange(5) * 0.1
    assert pick([tree], make_request([1.0], rows, branch=0.25)).trees[0].size == 4


def test_the_request_whose_tokens_are_worth_more_gets_the_rows() -> None:
    chain = make_tree([-1, 0, 1], [0.7, 0.7, 0.7])
    rows = np.asarray([0.0, 0.1, 0.2, 0.3, 5.0, 10.0, 15.0])
    sizes = [tree.size for tree in pick([chain, chain], make_request([0.2, 2.0], rows)).trees]
    assert sizes == [0, 3]


def test_where_rows_are_nearly_free_at_first_no_request_goes_without() -> None:
    """The likeliest of the second request come before the unlikeliest of the first."""
    chain = make_tree([-1, 0, 1, 2, 3, 4], [0.7] * 6)
    rows = np.asarray([0.0, 0.0, 0.0, 0.2, 0.7, 1.4, 2.1, 2.8, 3.5, 4.2, 4.9, 5.6, 6.3])
    sizes = [tree.size for tree in pick([chain, chain], make_request([3.0, 3.0], rows, tree=0.06)).trees]
    assert sizes == [4, 4]


def test_rows_that_cost_nothing_at_all_are_all_used() -> None:
    chain = make_tree([-1, 0, 1], [0.7] * 3)
    sizes = [tree.size for tree in pick([chain, chain], make_request([1.0, 2.0], np.zeros(7))).trees]
    assert sizes == [3, 3]


def test_a_chain_request_gets_no_branches() -> None:
    tree = make_tree([-1, 0, -1, 2], [0.5, 0.5, 0.49, 0.99])
    request = make_request([5.0], np.arange(5) * 0.01)
    chained = dataclasses.replace(request, is_chain=np.asarray([True]))
    assert pick([tree], chained).trees[0].token_ids.tolist() == [100, 101]


def test_where_too_little_is_saved_only_the_likeliest_nodes_are_tried() -> None:
    trees = [make_tree([-1, 0], [0.5, 0.9]), make_tree([-1], [0.4])]
    request = make_request([1.0, 1.0], np.arange(4) * 0.4)
    probing = dataclasses.replace(request, least_net=10.0, probes=2)
    found = NAIVE.pick(trees, probing)
    assert [tree.size for tree in found.trees] == [2, 0]
    assert 0.0 < found.net < 10.0


def test_nodes_beyond_a_requests_limits_are_not_verified() -> None:
    tree = make_tree([-1, 0, 1, 0], [0.9, 0.9, 0.9, 0.05])
    request = make_request([5.0], np.arange(5) * 0.01)
    shallow = dataclasses.replace(request, max_depth=np.asarray([2]))
    assert pick([tree], shallow).trees[0].token_ids.tolist() == [100, 101, 103]
    small = dataclasses.replace(request, max_nodes=np.asarray([2]))
    assert pick([tree], small).trees[0].token_ids.tolist() == [100, 101]
