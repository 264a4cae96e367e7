"""The C++ n-gram index equals its naive twin to the bit, however the text arrives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import ngram as ngram_naive
from tests.reference import trees
from vllm_specrollout import _core
from vllm_specrollout.config.drafters import NgramConfig
from vllm_specrollout.types import DraftTree


@st.composite
def configs(draw: st.DrawFn) -> NgramConfig:
    min_match = draw(st.integers(1, 4))
    max_match = min_match + draw(st.integers(0, 8))
    return NgramConfig(min_match=min_match, max_match=max_match, max_matches=draw(st.integers(1, 12)))


# few different tokens repeat a lot; the odd ones out are the extremes of the type
TEXTS = st.one_of(
    *(st.lists(st.integers(0, size), max_size=120) for size in (0, 1, 2, 5)),
    st.lists(st.sampled_from([0, 7, -1, 2**31 - 1, -(2**31)]), max_size=60),
)
CUTS = st.lists(st.integers(0, 120), max_size=5).map(sorted)
BOUNDS = st.tuples(st.integers(-1, 64), st.integers(-1, 20), st.booleans())


def make_index(config: NgramConfig) -> _core.NgramIndex:
    return _core.NgramIndex(min_match=config.min_match, max_match=config.max_match, max_matches=config.max_matches)


def tokens(values: list[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def as_tree(arrays: tuple[np.ndarray, ...]) -> DraftTree:
    token_ids, parents, log_q = arrays
    return DraftTree(token_ids, parents, log_q, np.zeros(len(token_ids), dtype=np.int32))


def assert_same(tree: DraftTree, expected: DraftTree) -> None:
    assert tree.token_ids.tolist() == expected.token_ids.tolist()
    assert tree.parents.tolist() == expected.parents.tolist()
    assert tree.log_q.tobytes() == expected.log_q.tobytes()


@settings(max_examples=400)
@given(configs(), TEXTS, CUTS, BOUNDS)
def test_a_draft_equals_the_naive_twins_however_the_text_was_cut_into_appends(config, text, cuts, bounds) -> None:
    index = make_index(config)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        index.append(tokens(text[start:end]))
        index.check_integrity()
    assert len(index) == len(text)
    tree = as_tree(index.propose(*bounds))
    assert_same(tree, ngram_naive.propose(text, config, *bounds))
    trees.check(tree)
    assert trees.is_ordered(tree)


@given(configs(), TEXTS, st.integers(1, 30), st.integers(1, 20))
def test_a_smaller_draft_is_a_prefix_of_a_larger_one(config, text, max_nodes, max_depth) -> None:
    index = make_index(config)
    index.append(tokens(text))
    small, large = (as_tree(index.propose(size, max_depth, False)) for size in (max_nodes, 64))
    assert small.token_ids.tolist() == large.token_ids[:max_nodes].tolist()
    assert small.parents.tolist() == large.parents[:max_nodes].tolist()


@given(configs(), TEXTS, TEXTS, st.integers(0, 120))
def test_a_synced_index_is_as_good_as_a_fresh_one(config, held, text, kept) -> None:
    index = make_index(config)
    index.sync(tokens(held))
    wanted = held[:kept] + text
    is_continued = index.sync(tokens(wanted))
    # the comparison looks 64 tokens back only: far older changes go unseen on purpose
    assert is_continued == (len(held) <= len(wanted) and held[-64:] == wanted[: len(held)][-64:])
    index.check_integrity()
    assert len(index) == len(wanted)
    if not is_continued or len(held) <= 64:
        assert_same(as_tree(index.propose(24, 8, False)), ngram_naive.propose(wanted, config, 24, 8))


@given(configs(), st.lists(st.tuples(TEXTS, BOUNDS), max_size=5))
def test_a_batch_is_its_single_drafts_one_after_the_other(config, requests) -> None:
    indices = []
    for text, _ in requests:
        indices.append(make_index(config))
        indices[-1].append(tokens(text))
    bounds = [np.asarray([b[i] for _, b in requests], dtype=kind) for i, kind in enumerate((np.int32, np.int32, bool))]
    offsets, *arrays = _core.propose_batch(indices, *bounds)
    assert offsets.dtype == np.int32 and offsets[0] == 0 and len(offsets) == len(requests) + 1
    for i, (_, bound) in enumerate(requests):
        part = tuple(array[offsets[i] : offsets[i + 1]] for array in arrays)
        assert_same(as_tree(part), as_tree(indices[i].propose(*bound)))


def test_an_index_keeps_its_invariants_over_a_long_random_text() -> None:
    rng = np.random.default_rng(7)
    index = make_index(NgramConfig(min_match=1, max_match=8))
    for _ in range(60):
        # from one token to many: chains grow long and tables large
        index.append(rng.integers(0, rng.integers(1, 2000), size=rng.integers(0, 200), dtype=np.int32))
        index.check_integrity()


def test_a_batch_with_missing_bounds_is_refused() -> None:
    index = make_index(NgramConfig())
    with pytest.raises(ValueError, match="one bound per index"):
        _core.propose_batch([index], np.ones(2, np.int32), np.ones(1, np.int32), np.ones(1, bool))
    with pytest.raises(ValueError, match="dimension"):
        index.append(np.zeros((2, 2), np.int32))


@pytest.mark.parametrize("bad", [(0, 4, 4), (3, 2, 4), (1, 2, 0)], ids=["no context", "empty range", "no places"])
def test_impossible_parameters_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="min_match"):
        _core.NgramIndex(min_match=bad[0], max_match=bad[1], max_matches=bad[2])
