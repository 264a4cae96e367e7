"""Trees that came from elsewhere, in the core, beside their naive twin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.received import Naive
from vllm_specrollout._core import Received

VOCABULARY = 3


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, int, float]]:
    token, rank = st.integers(0, VOCABULARY - 1), st.sampled_from((0, 0, 1, 2, 9))
    log_q = st.sampled_from((0.0, -0.5, -2.0))
    return [draw(st.tuples(token, st.integers(-1, i - 1), rank, log_q)) for i in range(draw(st.integers(0, 12)))]


def put(received: Received, handle: int, position: int, nodes: list[tuple[int, int, int, float]]) -> int:
    columns = [[handle], [position], [0, len(nodes)], *(zip(*nodes, strict=True) if nodes else [()] * 4)]
    kinds = (np.int64, np.int32, np.int32, np.int32, np.int32, np.uint8, np.float32)
    data = (np.array(column, kind).tobytes() for column, kind in zip(columns, kinds, strict=True))
    return received.put(*data, VOCABULARY)


def fit(
    received: Received, handles: list[int], texts: list[list[int]], most: int, depth: int, is_chain: bool
) -> list[list[tuple[int, int, float, int]]]:
    size = len(handles)
    starts, *columns = received.fit(
        np.array(handles, np.int64),
        [np.array(text, np.int32) for text in texts],
        np.full(size, most, np.int32),
        np.full(size, depth, np.int32),
        np.full(size, is_chain, np.bool_),
    )
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    return [rows[starts[r] : starts[r + 1]] for r in range(size)]


@given(
    data=st.data(),
    text=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
    most=st.integers(0, 8),
    depth=st.integers(0, 5),
    is_chain=st.booleans(),
)
def test_what_fits_is_what_the_naive_twin_finds(data, text, most, depth, is_chain) -> None:
    received, naive = Received(), Naive()
    received.open(7, 1)
    known = 1
    for _ in range(4):
        if data.draw(st.booleans()):
            position, nodes = data.draw(st.integers(1, len(text))), data.draw(trees())
            put(received, 7, position, nodes)
            naive.position, naive.nodes = position, tuple(nodes)
        known = data.draw(st.integers(known, len(text)))
        own = text[:known]
        found = fit(received, [0, 7], [own, own], most, depth, is_chain)
        assert found == [[], naive.fit(own, most, depth, is_chain)]
    ranks = naive.ranks
    counts = (len(ranks), ranks.count(0), sum(rank < 8 for rank in ranks))
    assert received.score(7) == counts == received.close(7)
    assert received.score(7) == (0, 0, 0)


def test_each_token_is_told_once_and_those_of_requests_that_are_not_followed_never() -> None:
    received = Received()
    received.open(3, 2)
    texts = [np.array([1, 2, 0, 1], np.int32), np.array([1, 1], np.int32), np.array([0, 0, 0], np.int32)]
    handles = np.array([3, 0, 9], np.int64)
    index, *told = received.tell(handles, texts)
    assert index.tolist() == [0] and np.frombuffer(told[0], np.int64).tolist() == [3]
    assert [np.frombuffer(one, np.int32).tolist() for one in told[1:]] == [[2], [0, 1]]
    index, *told = received.tell(handles, texts)
    assert not len(index) and told == [b"", b"", b""]


WRONG = {
    "a parent behind its child": (1, [(0, 0, 0, 0.0)]),
    "a parent above the root": (1, [(0, -2, 0, 0.0)]),
    "a token outside the vocabulary": (1, [(VOCABULARY, -1, 0, 0.0)]),
    "a token below 0": (1, [(-1, -1, 0, 0.0)]),
    "a probability above 1": (1, [(0, -1, 0, 0.1)]),
    "a probability that is no number": (1, [(0, -1, 0, float("nan"))]),
    "no probability at all": (1, [(0, -1, 0, float("-inf"))]),
    "a tree below no token": (0, [(0, -1, 0, 0.0)]),
}


@pytest.mark.parametrize("what", WRONG)
def test_trees_that_are_none_are_refused_and_what_had_come_stays(what: str) -> None:
    received = Received()
    received.open(1, 1)
    put(received, 1, 1, [(2, -1, 0, -0.5)])
    with pytest.raises(ValueError):
        put(received, 1, *WRONG[what])
    assert fit(received, [1], [[0]], 8, 8, False) == [[(2, -1, -0.5, 1)]]


GOOD = {
    "handles": np.ones(1, np.int64).tobytes(),
    "positions": np.ones(1, np.int32).tobytes(),
    "node_start": np.array([0, 2], np.int32).tobytes(),
    "token_ids": np.zeros(2, np.int32).tobytes(),
    "parents": np.array([-1, 0], np.int32).tobytes(),
    "ranks": bytes(2),
    "log_q": np.zeros(2, np.float32).tobytes(),
}


@pytest.mark.parametrize("name", GOOD)
def test_columns_that_do_not_belong_together_are_refused(name: str) -> None:
    received = Received()
    assert received.put(**GOOD, vocab_size=VOCABULARY) == 0
    for changed in (GOOD[name] + GOOD[name], GOOD[name][:-1], GOOD[name] + b"\0", b""):
        with pytest.raises(ValueError):
            received.put(**{**GOOD, name: changed}, vocab_size=VOCABULARY)


@pytest.mark.parametrize("starts", [(0, 3), (1, 2), (0, 1), (2, 2), (0, -1), (-2, 2)])
def test_starts_that_do_not_cover_the_nodes_are_refused(starts: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Received().put(**{**GOOD, "node_start": np.array(starts, np.int32).tobytes()}, vocab_size=VOCABULARY)


@given(data=st.data())
def test_any_bytes_are_trees_or_one_clear_error(data: st.DataObject) -> None:
    received = Received()
    received.open(1, 1)
    columns = {name: data.draw(st.just(good) | st.binary(max_size=24)) for name, good in GOOD.items()}
    try:
        received.put(**columns, vocab_size=VOCABULARY)
    except ValueError:
        return
    assert len(fit(received, [1], [[0, 1, 2]], 64, 64, False)) == 1
