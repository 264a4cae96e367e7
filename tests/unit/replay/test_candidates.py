from dataclasses import replace

import numpy as np

from tests.reference.trees import path_to
from tests.unit.replay.builders import trace_of, tree
from vllm_specrollout.budgets.base import bounded
from vllm_specrollout.replay.records import Candidates
from vllm_specrollout.replay.requests import RecordedDrafter, requests_of
from vllm_specrollout.trees.batch import batch_of
from vllm_specrollout.types import DraftTree, RequestBatch


def words(draft: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[path_to(draft.parents, i)].tolist()) for i in range(draft.size)]


def test_between_two_recorded_roots_the_earlier_tree_counts_as_far_as_it_holds() -> None:
    recorded = [Candidates.of(0, 1, tree([2, 3, 9, 4], [-1, 0, 0, 1])), Candidates.of(0, 5, tree([6], [-1]))]
    trace, asked = trace_of([[1, 2, 3, 4, 5, 6]], recorded), []
    (request,) = requests_of(trace, 1.0)
    drafter = RecordedDrafter(trace, {"r0": request}, asked.append)
    found = []
    for _ in range(7):
        batch = RequestBatch.of([request.view])
        found.append(words(drafter.propose(batch, bounded(batch, 8, 8)).tree(0)))
        request.advance(1, trace.header)
    trees = [[(2,), (2, 3), (2, 9), (2, 3, 4)], [(3,), (9,), (3, 4)], [(4,)]]
    assert found == [[], *trees, [], [(6,)], []] and asked == [1] * 7


def test_who_is_not_wanted_has_no_proposal() -> None:
    trace = trace_of([[1, 2], [1, 2]], [Candidates.of(i, 0, tree([1], [-1])) for i in range(2)])
    requests = {f"r{i}": request for i, request in enumerate(requests_of(trace, 1.0))}
    batch = RequestBatch.of([request.view for request in requests.values()])
    limits, asked = bounded(batch, 8, 8), []
    drafter = RecordedDrafter(trace, requests, asked.append)
    assert drafter.propose(batch, replace(limits, max_nodes=np.asarray([0, 8], np.int32))).sizes.tolist() == [0, 1]
    # an expensive drafter is asked for some requests alone, and that is all that it takes time for
    assert drafter.propose(batch, replace(limits, drafters=np.asarray([0, 1], np.uint32))).sizes.tolist() == [0, 1]
    assert asked == [2, 1]


def test_the_trees_of_a_batch_stand_one_behind_another() -> None:
    branching = tree([1, 2, 3], [-1, 0, 0])
    batch = batch_of(["a", "b", "c"], [branching, tree([], []), tree([7], [-1], source=2)])
    assert batch.node_start.tolist() == [0, 3, 3, 4] and batch.depth.tolist() == [1, 2, 2, 1]
    assert words(batch.tree(0)) == words(branching) and batch.tree(2).source.tolist() == [2]
    assert batch_of(["a"], [tree([], [])]).num_nodes == 0
