import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import merge_select as reference
from tests.trees import batch_of, limits_of, proposed, tree_of
from vllm_specrollout import _core
from vllm_specrollout.trees.batch import Prices, merge_select
from vllm_specrollout.types import EMPTY_TREE, SOURCES, TENTHS

COLUMNS = ("node_start", "token_ids", "parents", "log_q", "source", "depth")


def assert_same(found, wanted):
    for name in COLUMNS:
        a, b = getattr(found.trees, name), getattr(wanted.trees, name)
        assert a.dtype == b.dtype and a.tolist() == b.tolist(), name
    np.testing.assert_allclose(found.reach, wanted.reach, rtol=1e-6)
    assert found.num_proposed.tolist() == wanted.num_proposed.tolist()
    assert found.best_nodes == wanted.best_nodes
    np.testing.assert_allclose([found.ms, found.gain], [wanted.ms, wanted.gain], rtol=1e-9)


@st.composite
def prices(draw, nodes):
    steps = draw(st.lists(st.floats(0.0, 0.7), min_size=nodes, max_size=nodes))
    first = draw(st.sampled_from([0.0, 0.5, 4.0]))
    added = np.cumsum([0.0, *steps]) + np.asarray([0.0, *[first] * nodes])
    return Prices(draw(st.floats(0.5, 20.0)), added, draw(st.sampled_from([0.0, 0.1])), draw(st.floats(0.0, 1.0)))


@given(st.data())
def test_the_core_computes_what_the_specification_says(data):
    proposals = data.draw(proposed())
    count = proposals[0].num_requests
    nodes, chains = (st.lists(each, min_size=count, max_size=count) for each in (st.integers(0, 16), st.booleans()))
    limits = limits_of(count, data.draw(nodes), data.draw(st.integers(1, 8)), data.draw(chains))
    experience = st.integers(0, 99).map(lambda n: np.random.default_rng(n).uniform(0.1, 2.0, (SOURCES, TENTHS)))
    options = dict(
        calibration=data.draw(st.none() | experience),
        width=data.draw(st.sampled_from([0, 0, 1, 2])),
        prices=data.draw(st.none() | prices(sum(p.num_nodes for p in proposals))),
        least_nodes=data.draw(st.sampled_from([0, 2, 64])),
    )
    assert_same(*(by(proposals, limits, **options) for by in (merge_select, reference.merge_select)))


def test_more_than_a_few_nodes_are_ranked_as_the_few_are():
    rng = np.random.default_rng(5)

    def bushy(source):
        parents = [int(rng.integers(-1, max(i, 1))) if i else -1 for i in range(48)]
        return tree_of(parents, rng.permutation(48), rng.choice([0.2, 0.5, 0.5, 0.9], 48), source)

    proposals = [batch_of([bushy(source) for _ in range(9)]) for source in range(2)]
    options = dict(prices=Prices(10.0, 0.02 * np.arange(9 * 96 + 1), 0.05, 0.3))
    assert_same(*(by(proposals, limits_of(9), **options) for by in (merge_select, reference.merge_select)))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (2, [5, 0], "parent 5 does not come before it"),
        (4, [99, 0], "source 99 is not a drafter's index"),
        (0, [0, 1], "node_start does not cover the nodes"),
        (1, [1], "parents has 2 entries, not 1"),
    ],
)
def test_what_is_no_tree_is_an_error_that_says_why(column, value, words):
    tree = batch_of([tree_of([-1, 0], [1, 2], [0.5, 0.5])])
    columns = [tree.node_start, tree.token_ids, tree.parents, tree.log_q, tree.source]
    columns[column] = np.asarray(value, dtype=np.int32)
    limits = limits_of(1)
    with pytest.raises(ValueError, match=words):
        _core.merge_select([tuple(columns)], limits.max_nodes, limits.max_depth, limits.is_chain, None, 0, None, 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("log_q", np.float32("nan"), "is not the log of a probability"),
        ("log_q", np.float32(0.5), "is not the log of a probability"),
        ("token_ids", np.int32(100), "token 100 is outside the vocabulary of 100"),
        ("token_ids", np.int32(-1), "token -1 is outside the vocabulary of 100"),
        ("parents", np.int32(1), "parent 1 does not come before it"),
    ],
)
def test_a_drafters_words_are_checked_too(field, value, words):
    tree = batch_of([EMPTY_TREE, tree_of([-1, 0], [1, 2], [0.5, 0.5])])
    getattr(tree, field)[1] = value
    with pytest.raises(ValueError, match=f"request 1, node 1: .*{words}"):
        _core.check_batch(tree.node_start, tree.token_ids, tree.parents, tree.log_q, tree.source, 2, 100)


def test_what_is_counted_is_what_the_target_put_to_the_test():
    tree = tree_of([-1, 0, 0, 2, -1], [1, 2, 3, 4, 5], [0.55, 0.32, 0.44, 0.93, 0.07])
    trees = batch_of([EMPTY_TREE, tree])
    accepted = np.asarray([0, 2], dtype=np.int32)
    (reached, expected, hits), verified, taken = _core.tally(
        trees.node_start, trees.parents, trees.log_q, trees.source, np.asarray([0, 2], np.int32), accepted
    )
    # of five nodes all but none below a rejected one are reached: the root's two, the first one's two, and the third's
    assert reached[0].tolist() == [1, 0, 0, 1, 1, 1, 0, 0, 0, 1] and reached[1:].sum() == 0
    assert hits[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert math.isclose(expected.sum(), 0.55 + 0.32 + 0.44 + 0.93 + 0.07, rel_tol=1e-6)
    assert verified[0] == 5 and taken[0] == 2
