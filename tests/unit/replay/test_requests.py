"""Requests of a trace: what is drafted for them, and what of it is accepted."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.trees import from_paths, path_to
from tests.unit.replay.builders import trace_of, tree
from vllm_specrollout.budgets.base import bounded
from vllm_specrollout.replay.records import Candidates
from vllm_specrollout.replay.requests import RecordedDrafter, requests_of, verified
from vllm_specrollout.trees.batch import batch_of, cut
from vllm_specrollout.types import DraftTree, RequestBatch

tokens = st.integers(0, 2)
drafts = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=5), st.floats(0.1, 1.0)), max_size=6)
cases = st.lists(st.tuples(drafts, st.lists(tokens, max_size=6)), min_size=1, max_size=4)


def ints(values) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


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


@given(cases)
def test_the_longest_path_that_agrees_with_the_truth_is_accepted(requests) -> None:
    trees = [from_paths(paths, 64, 5) for paths, _ in requests]
    result = verified(batch_of([str(i) for i in range(len(trees))], trees), [ints(truth) for _, truth in requests])
    accepted = iter(result.accepted.tolist())
    for draft, (_, truth), count in zip(trees, requests, result.num_accepted.tolist(), strict=True):
        agreeing = [i for i, word in enumerate(words(draft)) if list(word) == truth[: len(word)]]
        assert sorted(next(accepted) for _ in range(count)) == agreeing


@given(cases, st.data())
def test_dropping_some_requests_drafts_leaves_the_others_as_they_are(requests, data) -> None:
    batch = batch_of([str(i) for i in range(len(requests))], [from_paths(paths, 64, 5) for paths, _ in requests])
    dropped = [data.draw(st.booleans()) for _ in requests]
    kept = cut(batch, np.where(dropped, 0, batch.sizes))
    for i, is_dropped in enumerate(dropped):
        before, after = batch.tree(i), kept.tree(i)
        assert after.token_ids.tolist() == ([] if is_dropped else before.token_ids.tolist())
        assert after.parents.tolist() == ([] if is_dropped else before.parents.tolist())
    assert kept.depth.size == kept.num_nodes
