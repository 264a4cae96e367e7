import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.trees import from_paths, path_to
from tests.unit.replay.builders import tree
from vllm_specrollout.replay.requests import verified
from vllm_specrollout.trees.batch import batch_of, cut

tokens = st.integers(0, 2)
drafts = st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=5), st.floats(0.1, 1.0)), max_size=6)
cases = st.lists(st.tuples(drafts, st.lists(tokens, max_size=6)), min_size=1, max_size=4)


def ints(values) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@given(cases)
def test_the_longest_path_that_agrees_with_the_truth_is_accepted(requests) -> None:
    trees = [from_paths(paths, 64, 5) for paths, _ in requests]
    result = verified(batch_of([str(i) for i in range(len(trees))], trees), [ints(truth) for _, truth in requests])
    accepted = iter(result.accepted.tolist())
    for draft, (_, truth), count in zip(trees, requests, result.num_accepted.tolist(), strict=True):
        words = [draft.token_ids[path_to(draft.parents, i)].tolist() for i in range(draft.size)]
        agreeing = [i for i, word in enumerate(words) if word == truth[: len(word)]]
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


def test_nothing_is_accepted_beyond_the_end_of_an_answer() -> None:
    result = verified(batch_of(["a"], [tree([5, 6], [-1, 0])]), [ints([])])
    assert result.num_accepted.tolist() == [0] and result.accepted.size == 0
