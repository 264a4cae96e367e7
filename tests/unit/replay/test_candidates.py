from dataclasses import replace

import numpy as np

from tests.reference.trees import path_to
from tests.unit.replay.builders import trace_of, tree
from vllm_specrollout.replay.candidates import RecordedTrees, of_sources
from vllm_specrollout.replay.records import Candidates
from vllm_specrollout.trees.batch import batch_of
from vllm_specrollout.types import DraftTree


def words(draft: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[path_to(draft.parents, i)].tolist()) for i in range(draft.size)]


def test_between_two_recorded_roots_the_earlier_tree_counts_as_far_as_it_holds() -> None:
    truth = np.asarray([1, 2, 3, 4, 5, 6], dtype=np.int32)
    recorded = [Candidates(0, 1, tree([2, 3, 9, 4], [-1, 0, 0, 1])), Candidates(0, 5, tree([6], [-1]))]
    trees = RecordedTrees(trace_of([truth.tolist()], recorded))
    assert trees.at(0, 0, truth).size == 0
    assert words(trees.at(0, 1, truth)) == [(2,), (2, 3), (2, 9), (2, 3, 4)]
    assert words(trees.at(0, 2, truth)) == [(3,), (9,), (3, 4)]
    assert words(trees.at(0, 3, truth)) == [(4,)]
    assert trees.at(0, 4, truth).size == 0
    assert words(trees.at(0, 5, truth)) == [(6,)]
    assert trees.at(0, 6, truth).size == 0
    assert trees.at(7, 1, truth).size == 0


def test_the_trees_of_a_batch_stand_one_behind_another() -> None:
    branching = tree([1, 2, 3], [-1, 0, 0])
    batch = batch_of(["a", "b", "c"], [branching, tree([], []), tree([7], [-1], source=2)])
    assert batch.node_start.tolist() == [0, 3, 3, 4] and batch.depth.tolist() == [1, 2, 2, 1]
    assert words(batch.tree(0)) == words(branching) and batch.tree(2).source.tolist() == [2]
    assert batch_of(["a"], [tree([], [])]).num_nodes == 0


def test_without_its_parent_a_drafters_node_goes_too() -> None:
    mixed = replace(tree([1, 2, 3, 4], [-1, 0, 1, -1]), source=np.asarray([0, 1, 0, 1], dtype=np.int32))
    assert words(of_sources(mixed, 0b01)) == [(1,)]
    assert words(of_sources(mixed, 0b10)) == [(4,)]
    assert of_sources(mixed, 0b11) is mixed
