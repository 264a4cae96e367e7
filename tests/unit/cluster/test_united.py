"""Trees of several drafters become one: against the naive twin, and by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import united as naive
from tests.reference.united import Row
from vllm_specrollout.cluster.link import Fitting
from vllm_specrollout.cluster.united import united


@st.composite
def trees(draw: st.DrawFn, is_chain: bool = False) -> list[Row]:
    """A tree without double children, whose first child of each node is a first choice."""
    tree: list[Row] = []
    taken: dict[int, set[int]] = {}
    for node in range(draw(st.integers(0, 12))):
        parent = node - 1 if is_chain else draw(st.integers(-1, node - 1))
        own = taken.setdefault(parent, set())
        token = draw(st.integers(0, 3))
        if token in own:
            token = next(free for free in range(4, 30) if free not in own)
        # few values, so that many nodes are equally likely
        tree.append((token, parent, draw(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0])), int(not own)))
        own.add(token)
    return tree


def batch(*requests: list[Row]) -> Fitting:
    rows = [row for own in requests for row in own]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return Fitting(
        np.cumsum([0, *map(len, requests)]).astype(np.int32),
        np.array(columns[0], np.int32),
        np.array(columns[1], np.int32),
        np.array(columns[2], np.float32),
        np.array(columns[3], np.int32),
    )


def rows(found: Fitting, request: int) -> list[Row]:
    part = slice(int(found.node_start[request]), int(found.node_start[request + 1]))
    columns = (found.token_ids, found.parents, found.log_q, found.is_first)
    return list(zip(*(column[part].tolist() for column in columns), strict=True))


def check(drafts: list[list[Row]], most: int, is_chain: bool) -> list[Row]:
    """In a batch, beside a request for which nothing came, and one for which one drafter alone has something."""
    alone = [(7, -1, -0.5, 1)]
    found = united(
        [batch([], own, alone if i == 0 else []) for i, own in enumerate(drafts)],
        np.full(3, most, np.int32),
        np.full(3, is_chain, np.bool_),
    )
    assert rows(found, 0) == [] and rows(found, 2) == alone
    return rows(found, 1)


@given(drafts=st.lists(trees(), min_size=2, max_size=3), most=st.integers(12, 40))
def test_the_union_is_that_of_its_naive_twin(drafts: list[list[Row]], most: int) -> None:
    found = check(drafts, most, is_chain=False)
    others = [own for own in drafts if own]
    if len(others) > 1:
        paths = zip(naive.paths_of(found), found, strict=True)
        assert [(path, q, first) for path, (_, _, q, first) in paths] == naive.united(drafts, most, False)


@given(drafts=st.lists(trees(is_chain=True), min_size=2, max_size=3), most=st.integers(12, 40))
def test_a_union_of_chains_is_a_chain(drafts: list[list[Row]], most: int) -> None:
    found = check(drafts, most, is_chain=True)
    assert [parent for _, parent, _, _ in found] == list(range(-1, len(found) - 1))


def test_a_node_of_two_drafters_keeps_the_higher_word_and_stays_a_first_choice() -> None:
    one = [(5, -1, -0.5, 1), (6, 0, -0.125, 1), (7, -1, -2.0, 0)]
    other = [(7, -1, -0.25, 1), (5, -1, -1.0, 0), (8, 1, -0.75, 1)]
    assert check([one, other], 64, False) == [(7, -1, -0.25, 1), (5, -1, -0.5, 1), (6, 1, -0.125, 1), (8, 1, -0.75, 1)]


def test_what_is_left_out_is_what_is_reached_least() -> None:
    one, other = [(1, -1, -1.0, 1), (2, 0, -1.0, 1)], [(3, -1, -0.5, 1), (4, 0, -2.0, 1)]
    assert [token for token, *_ in check([one, other], 3, False)] == [3, 1, 2]
