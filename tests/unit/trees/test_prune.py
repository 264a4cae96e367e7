"""Pruning keeps what the decision allows and what pays, and never breaks the order of a tree."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.trees import build
from vllm_specrollout.trees.prune import prune
from vllm_specrollout.types import ROOT, Decision, DraftTree, Shape, chain

PROBABILITIES = (0.0625, 0.25, 0.5, 0.9, 1.0)


@st.composite
def ordered_trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 14))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(size)]
    log_q = [math.log(draw(st.sampled_from(PROBABILITIES))) for _ in range(size)]
    return build.order(
        DraftTree(
            np.arange(size, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.asarray(log_q, dtype=np.float32),
            np.zeros(size, dtype=np.int32),
        )
    )


DECISIONS = st.builds(
    Decision,
    max_nodes=st.integers(0, 14),
    max_depth=st.integers(0, 6),
    shape=st.sampled_from(Shape),
    min_probability=st.sampled_from((0.0, 0.01, 0.1, 0.25, 0.6)),
    path_cost=st.sampled_from((0.0, 0.5, 4.0)),
)


@given(ordered_trees(), DECISIONS)
def test_a_pruned_tree_stays_within_the_decision_and_in_order(tree: DraftTree, decision: Decision) -> None:
    pruned = prune(tree, decision)
    build.check(pruned)
    assert build.is_ordered(pruned)
    assert pruned.size <= decision.max_nodes
    assert max(build.depths(pruned.parents).tolist(), default=0) <= decision.max_depth
    if decision.shape is Shape.CHAIN:
        assert pruned.parents.tolist() == list(range(-1, pruned.size - 1))
    if decision.shape is Shape.OFF:
        assert pruned.size == 0


@given(ordered_trees(), DECISIONS)
def test_every_node_left_pays_for_its_row_and_for_the_path_it_opens(tree: DraftTree, decision: Decision) -> None:
    pruned = prune(tree, decision)
    probability = np.exp(build.cumulative_log_q(pruned))
    parents = pruned.parents.tolist()
    for node in range(pruned.size):
        opens_path = parents[node] in parents[:node]
        price = decision.min_probability * (1.0 + decision.path_cost * opens_path)
        assert probability[node] >= price * (1 - 1e-5)


@given(ordered_trees(), st.integers(1, 14))
def test_without_other_bounds_pruning_is_a_prefix(tree: DraftTree, max_nodes: int) -> None:
    pruned = prune(tree, Decision(max_nodes, max_depth=64, shape=Shape.TREE))
    assert pruned.token_ids.tolist() == tree.token_ids[:max_nodes].tolist()


@given(ordered_trees())
def test_a_chain_follows_the_best_child_from_the_root_down(tree: DraftTree) -> None:
    pruned = prune(tree, Decision(max_nodes=64, max_depth=64, shape=Shape.CHAIN))
    expected, node = [], ROOT
    while True:
        children = [child for child in range(tree.size) if tree.parents[child] == node]
        if not children:
            break
        node = max(children, key=lambda child: tree.log_q[child])
        expected.append(int(tree.token_ids[node]))
    assert pruned.token_ids.tolist() == expected


def test_a_tree_that_needs_no_cut_is_returned_as_it_is() -> None:
    tree = chain([1, 2, 3], probability=0.9)
    assert prune(tree, Decision(8, 8, Shape.TREE, min_probability=0.5, path_cost=2.0)) is tree


def test_a_node_exactly_at_the_threshold_survives_the_rounding_of_its_logarithm() -> None:
    for numerator in range(1, 200):
        probability = numerator / 200
        assert prune(chain([1], probability=probability), Decision(1, 1, Shape.TREE, probability)).size == 1


def test_a_second_path_must_pay_the_path_cost_while_a_longer_path_need_not() -> None:
    tree = build.from_paths([([1, 2, 3], 6.0), ([1, 4], 3.0), ([5], 1.0)], max_nodes=8, max_depth=8)
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5]
    cheap = prune(tree, Decision(8, 8, Shape.TREE, min_probability=0.2))
    assert cheap.token_ids.tolist() == [1, 2, 3, 4]
    # [4] has 0.3, which pays for one row but not for the two that a new path costs
    dear = prune(tree, Decision(8, 8, Shape.TREE, min_probability=0.2, path_cost=1.0))
    assert dear.token_ids.tolist() == [1, 2, 3]
