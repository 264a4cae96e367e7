import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import trees as made
from tests.trees import chain, tree_of
from vllm_specrollout.trees import build
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree

PROBABILITIES = (0.0625, 0.25, 0.5, 0.9, 1.0)


def make(nodes: list[tuple[int, int, float]], source: int = 0) -> DraftTree:
    """A tree from (token, parent, probability)."""
    return tree_of(*([node[i] for node in nodes] for i in (1, 0, 2)), source=source)


@st.composite
def trees(draw: st.DrawFn, max_size: int = 12, source: int = 0) -> DraftTree:
    """Parents before children and no equal siblings, otherwise in any order."""
    nodes: list[tuple[int, int, float]] = []
    for node in range(draw(st.integers(0, max_size))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {token for token, other, _ in nodes if other == parent}
        token = draw(st.integers(0, 14).filter(lambda token, taken=taken: token not in taken))
        nodes.append((token, parent, draw(st.sampled_from(PROBABILITIES))))
    return make(nodes, source)


def by_path(tree: DraftTree) -> dict[tuple[int, ...], tuple[float, int]]:
    """Tokens from the root down -> (log_q, source) of the node."""
    paths = [tuple(tree.token_ids[made.path_to(tree.parents, node)].tolist()) for node in range(tree.size)]
    return dict(zip(paths, zip(tree.log_q.tolist(), tree.source.tolist(), strict=True), strict=True))


@given(trees(), st.integers(0, 14))
def test_the_first_nodes_are_a_tree_of_their_own(tree: DraftTree, count: int) -> None:
    first = made.first_nodes(tree, count)
    made.check(first)
    assert first.token_ids.tolist() == tree.token_ids.tolist()[:count]
    assert first.parents.tolist() == tree.parents.tolist()[:count]


@given(trees())
def test_a_chain_is_a_tree_with_one_path_at_most(tree: DraftTree) -> None:
    assert made.is_chain(tree) == (made.num_paths(tree.parents) <= 1)


def best_gain(tree: DraftTree, size: int) -> float:
    """The largest expected number of accepted tokens of any subtree of this size, by trying all."""
    gain = [math.exp(value) for value in build.cumulative_log_q(tree)]
    parents = tree.parents.tolist()
    return max(
        sum(gain[node] for node in nodes)
        for nodes in itertools.combinations(range(tree.size), size)
        if all(parents[node] == ROOT or parents[node] in nodes for node in nodes)
    )


@given(trees())
def test_ordering_keeps_the_nodes_and_the_invariants_and_twice_changes_nothing_more(tree: DraftTree) -> None:
    ordered = build.order(tree)
    made.check(ordered)
    assert made.is_ordered(ordered)
    assert by_path(ordered) == by_path(tree)
    assert list(by_path(build.order(ordered))) == list(by_path(ordered))


@given(trees(max_size=8))
def test_every_prefix_of_an_ordered_tree_is_the_best_subtree_of_its_size(tree: DraftTree) -> None:
    ordered = build.order(tree)
    gain = np.exp(build.cumulative_log_q(ordered))
    for size in range(1, tree.size + 1):
        assert sum(gain[:size]) == pytest.approx(best_gain(tree, size))


def test_ties_go_to_the_earlier_parent_and_then_to_the_earlier_node() -> None:
    tree = make([(1, ROOT, 1.0), (2, 0, 0.5), (3, ROOT, 0.5), (4, 1, 1.0), (5, ROOT, 0.5)])
    # 3 and 5 hang on the root, which comes before node 1, the parent of 2
    assert build.order(tree).token_ids.tolist() == [1, 3, 5, 2, 4]


PATHS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 9).map(float)), max_size=8
)


@given(PATHS, st.integers(1, 12), st.integers(1, 5))
def test_a_trie_holds_the_heaviest_prefixes_with_their_conditional_probabilities(paths, max_nodes, max_depth) -> None:
    weight: dict[tuple[int, ...], float] = {(): sum(weight for _, weight in paths)}
    for path, path_weight in paths:
        for depth in range(1, min(len(path), max_depth) + 1):
            weight[tuple(path[:depth])] = weight.get(tuple(path[:depth]), 0.0) + path_weight
    tree = made.from_paths(paths, max_nodes, max_depth, source=3)
    made.check(tree)
    nodes = by_path(tree)
    assert len(nodes) == min(max_nodes, len(weight) - 1)
    for path, (log_q, source) in nodes.items():
        assert math.exp(log_q) == pytest.approx(weight[path] / weight[path[:-1]])
        assert source == 3
    if nodes:
        left_out = [value for path, value in weight.items() if path and path not in nodes]
        assert max(left_out, default=0.0) <= min(weight[path] for path in nodes) * (1 + 1e-6)


@given(trees(source=0), trees(source=1))
def test_a_union_holds_every_node_with_its_best_probability_and_that_ones_source(first, second) -> None:
    merged = made.union([first, second], max_nodes=64)
    made.check(merged)
    assert made.is_ordered(merged)
    left, right, both = by_path(first), by_path(second), by_path(merged)
    assert both.keys() == left.keys() | right.keys()
    for path, node in both.items():
        candidates = [nodes[path] for nodes in (left, right) if path in nodes]
        # max() keeps the first of equals: the earlier tree's source
        assert node == max(candidates, key=lambda candidate: candidate[0])


@given(trees(), trees(), st.integers(0, 10))
def test_a_union_cut_short_is_the_prefix_of_the_whole_union(first, second, max_nodes) -> None:
    whole, cut = made.union([first, second], 64), made.union([first, second], max_nodes)
    assert list(by_path(cut)) == list(by_path(whole))[:max_nodes]


@given(trees())
def test_depths_paths_and_leaves_agree_with_each_other(tree: DraftTree) -> None:
    paths = [made.path_to(tree.parents, node) for node in range(tree.size)]
    assert build.depths(tree.parents).tolist() == [len(path) for path in paths]
    leaves = [node for node in range(tree.size) if node not in tree.parents]
    assert made.num_paths(tree.parents) == len(leaves)


def test_nothing_drafted_stays_nothing() -> None:
    assert build.order(EMPTY_TREE).size == 0
    assert made.union([], 8).size == 0
    assert made.from_paths([], 8, 8).size == 0
    assert made.num_paths(EMPTY_TREE.parents) == 0
    made.check(EMPTY_TREE)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (make([(1, 1, 0.5), (2, ROOT, 0.5)]), "does not come before it"),
        (make([(1, -2, 0.5)]), "does not come before it"),
        (make([(1, ROOT, 0.5), (1, ROOT, 0.25)]), "same token 1"),
        (make([(1, ROOT, 2.0)]), "at most 1"),
        (DraftTree(*(np.zeros(1, dtype=np.int64),) * 4), "token_ids is int64"),
        (replace(chain([1]), source=np.zeros(2, dtype=np.int32)), "source has shape"),
        (replace(chain([1]), log_q=np.full(1, -np.inf, dtype=np.float32)), "log_q -inf"),
    ],
    ids=["child first", "parent below the root", "equal siblings", "above 1", "wide tokens", "ragged", "zero"],
)
def test_a_broken_tree_is_named_with_its_reason(tree: DraftTree, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made.check(tree)


@given(PATHS, st.lists(st.integers(0, 3), max_size=4).map(tuple))
def test_what_hangs_below_a_path_is_what_a_search_finds(paths, path: tuple[int, ...]) -> None:
    draft = made.from_paths(paths, 64, 5)
    subtree, size = build.below(draft, path), len(path)
    assert list(by_path(subtree)) == [own[size:] for own in by_path(draft) if own[:size] == path and len(own) > size]
    made.check(subtree)
    assert made.is_ordered(subtree)
