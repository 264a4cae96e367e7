import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import tree_parents
from vllm_specrollout.types import DraftTree, chain
from vllm_specrollout.verify.rules import accepted_path, verify


@given(tree_parents(24), st.data())
def test_the_path_told_from_the_tokens_is_the_path_of_the_verdict(parents, data):
    n = len(parents)
    # siblings differ: a node's token is its rank among them
    tokens = [parents[:i].count(parent) for i, parent in enumerate(parents)]
    ints = [np.asarray(column, dtype=np.int32) for column in (tokens, parents, [0] * n)]
    tree = DraftTree(ints[0], ints[1], np.zeros(n, dtype=np.float32), ints[2])
    sampled = data.draw(st.lists(st.integers(0, 6), min_size=tree.size + 1, max_size=tree.size + 1))
    verdict = verify(tree, sampled)
    assert accepted_path(tree, verdict.output(tree)[:-1]).tolist() == verdict.accepted.tolist()


def test_tokens_that_are_no_path_are_an_error():
    with pytest.raises(ValueError, match="token 9"):
        accepted_path(chain([1, 2]), [1, 9])
