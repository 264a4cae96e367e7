from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.drafters import views_of
from tests.reference.ends import open_nodes
from tests.reference.trees import first_nodes, is_chain, num_paths
from tests.trees import batch_of, drafted, tree_of
from vllm_specrollout.trees.batch import (
    as_chains,
    chains,
    cut,
    joined,
    num_branches,
    on_host,
    take,
    token_lists,
    with_branches,
    without_ends,
)
from vllm_specrollout.trees.build import order, select
from vllm_specrollout.types import EMPTY_TREE, ROOT, RequestBatch, TreeBatch

BATCHES = st.lists(drafted().map(order), min_size=1, max_size=5)
COLUMNS = ("token_ids", "parents", "log_q", "source")


def assert_trees(trees, wanted):
    assert trees.num_requests == len(wanted)
    for i, tree in enumerate(wanted):
        own = trees.tree(i)
        for name in COLUMNS:
            assert getattr(own, name).tolist() == getattr(tree, name).tolist()
    rebuilt = batch_of(wanted)
    assert trees.depth.tolist() == rebuilt.depth.tolist() and trees.depth.dtype == np.int32
    assert trees.node_start.tolist() == rebuilt.node_start.tolist()


@given(BATCHES, st.data())
def test_trees_are_taken_in_any_order_and_cut(trees, data):
    index = data.draw(st.lists(st.integers(0, len(trees) - 1), min_size=1, max_size=6))
    counts = [data.draw(st.integers(0, trees[i].size)) for i in index]
    names = list("abcdef"[: len(index)])
    taken = take(batch_of(trees), names, np.asarray(index), np.asarray(counts, np.int32))
    assert_trees(taken, [first_nodes(trees[i], n) for i, n in zip(index, counts, strict=True)])
    assert taken.request_ids == names


def test_trees_that_stay_as_they_are_are_not_copied():
    trees = batch_of([tree_of([-1, 0], [1, 2], [0.5, 0.5]), EMPTY_TREE, tree_of([-1], [3], [0.5])])
    same = take(trees, trees.request_ids, np.asarray([0, 0, 2]), trees.sizes)
    assert same is trees
    assert cut(trees, np.asarray([9, 9, 9])) is trees


@given(BATCHES)
def test_branches_are_found_and_counted(trees):
    batch = batch_of(trees)
    assert with_branches(batch).tolist() == [not is_chain(tree) for tree in trees]
    assert num_branches(batch) == sum(num_paths(tree.parents) - 1 for tree in trees if tree.size)


def best_path(tree):
    """First children from the root down."""
    path, node = [], ROOT
    while children := [i for i, parent in enumerate(tree.parents.tolist()) if parent == node]:
        node = children[0]
        path.append(node)
    return select(tree, path) if path else EMPTY_TREE


@given(BATCHES, st.data())
def test_a_chain_is_the_best_path_of_its_tree(trees, data):
    where = data.draw(st.lists(st.booleans(), min_size=len(trees), max_size=len(trees)))
    wanted = [best_path(tree) if only else tree for tree, only in zip(trees, where, strict=True)]
    assert_trees(as_chains(batch_of(trees), np.asarray(where)), wanted)


@given(BATCHES, BATCHES, st.data())
def test_two_batches_are_joined_request_by_request(some, others, data):
    count = min(len(some), len(others))
    where = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    wanted = [b if other else a for a, b, other in zip(some, others, where, strict=False)]
    assert_trees(joined(batch_of(some[:count]), batch_of(others[:count]), np.asarray(where)), wanted)


def test_tokens_alone_are_chains():
    batch = chains(["a", "b", "c"], [[5, 6, 7], [], [8]])
    assert [is_chain(batch.tree(i)) for i in range(3)] == [True] * 3
    assert token_lists(batch) == [[5, 6, 7], [], [8]] and batch.depth.tolist() == [1, 2, 3, 1]


class OnDevice:
    def __init__(self, column):
        self.column = column

    def cpu(self):
        return self.column

    # as a tensor's, so that a batch can count its nodes where they are
    def __len__(self):
        return len(self.column)

    def __getitem__(self, index):
        return OnDevice(self.column[index])

    def __sub__(self, other):
        return OnDevice(self.column - other.column)


def test_trees_that_a_drafter_left_on_its_device_come_home():
    batch = batch_of([tree_of([-1, 0], [1, 2], [0.5, 0.5])])
    away = TreeBatch(batch.request_ids, *(OnDevice(getattr(batch, name)) for name in ("node_start", *COLUMNS, "depth")))
    assert_trees(on_host(away), [batch.tree(0)])
    assert on_host(batch) is batch


@given(BATCHES, st.data())
def test_no_node_has_an_end_token_or_stands_behind_one_and_the_others_keep_their_order(trees, data):
    ends = [data.draw(st.sets(st.integers(0, 4), max_size=2)) for _ in trees]
    own_ends = [np.asarray(sorted(own), np.int32) for own in ends]
    views = [replace(view, ends=own) for view, own in zip(views_of(len(trees)), own_ends, strict=True)]
    batch, given_trees = RequestBatch.of(views), batch_of(trees)
    left = without_ends(given_trees, batch)
    assert_trees(left, [select(tree, open_nodes(tree, own)) for tree, own in zip(trees, ends, strict=True)])
    assert left is given_trees or left.num_nodes < given_trees.num_nodes
    filled = batch.ends_of(range(len(views)))
    assert [{token for token in row if token >= 0} for row in filled.tolist()] == ends
