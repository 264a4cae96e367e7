"""What an n-gram draft promises, shown on the specification (the C++ index equals it, see tests/csrc)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import ngram as ngram_naive
from tests.reference import trees
from vllm_specrollout.config.drafters import NgramConfig
from vllm_specrollout.trees import build
from vllm_specrollout.types import ROOT, DraftTree

CONFIG = NgramConfig(min_match=2, max_match=4)
TEXTS = st.lists(st.integers(0, 3), max_size=40)


def first_level(tree: DraftTree) -> dict[int, float]:
    """Token -> probability of the nodes of depth 1."""
    return {int(t): math.exp(q) for t, p, q in zip(tree.token_ids, tree.parents, tree.log_q, strict=True) if p == ROOT}


@given(TEXTS, st.integers(0, 20), st.integers(0, 8), st.booleans())
def test_every_draft_is_a_sound_ordered_tree_within_its_bounds(text, max_nodes, max_depth, is_chain) -> None:
    tree = ngram_naive.propose(text, CONFIG, max_nodes, max_depth, is_chain)
    trees.check(tree)
    assert trees.is_ordered(tree)
    assert tree.size <= max_nodes
    assert max(build.depths(tree.parents).tolist(), default=0) <= max_depth
    assert not is_chain or trees.num_paths(tree.parents) <= 1


@given(TEXTS)
def test_every_path_occurred_after_the_texts_last_tokens(text) -> None:
    tree = ngram_naive.propose(text, CONFIG, 20, 6)
    for node in range(tree.size):
        wanted = text[-2:] + tree.token_ids[trees.path_to(tree.parents, node)].tolist()
        assert any(text[start : start + len(wanted)] == wanted for start in range(len(text)))


@given(TEXTS)
def test_sibling_probabilities_never_add_up_to_more_than_one(text) -> None:
    tree = ngram_naive.propose(text, CONFIG, 64, 6)
    for parent in {ROOT, *range(tree.size)}:
        assert np.exp(tree.log_q[tree.parents == parent]).sum() <= 1 + 1e-5


@given(TEXTS)
def test_a_chain_starts_with_the_best_token_of_the_tree(text) -> None:
    tree, chain = (ngram_naive.propose(text, CONFIG, 8, 4, is_chain) for is_chain in (False, True))
    assert chain.token_ids[:1].tolist() == tree.token_ids[:1].tolist()


def test_a_text_that_never_repeats_gives_no_draft() -> None:
    assert ngram_naive.propose(list(range(50)), CONFIG, 8, 8).size == 0
    assert ngram_naive.propose([], CONFIG, 8, 8).size == 0


def test_a_longer_context_outweighs_a_shorter_one_which_fills_what_is_left() -> None:
    # after [1 2 3]: 7; after [2 3] only: 8
    text = [1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3]
    probability = first_level(ngram_naive.propose(text, CONFIG, 8, 1))
    assert list(probability) == [7, 8]
    # one place each, so 1 / (1 + doubt) with the doubts of 3 and of 2 tokens: 1 and 30/16
    assert probability[7] == pytest.approx(1 / 2, abs=1e-6)
    assert probability[8] == pytest.approx(1 / 2 / (1 + 30 / 16), abs=1e-6)


def test_agreeing_places_are_trusted_more_and_disagreeing_ones_less() -> None:
    agree = first_level(ngram_naive.propose([1, 2, 7] * 3 + [4, 1, 2], NgramConfig(max_match=2), 8, 1))
    differ = first_level(ngram_naive.propose([1, 2, 7, 1, 2, 8, 1, 2], NgramConfig(max_match=2), 8, 1))
    single = first_level(ngram_naive.propose([1, 2, 7, 1, 2], NgramConfig(max_match=2), 8, 1))
    assert agree[7] > 2 * single[7]
    assert max(differ.values()) < single[7]
    # of two that disagree, the newer one leads by half
    assert differ[8] == pytest.approx(1.5 * differ[7], rel=1e-5)


def test_the_most_recent_places_are_the_ones_compared() -> None:
    text = [1, 2, 7] * 5 + [1, 2, 8] * 2 + [1, 2]
    assert set(first_level(ngram_naive.propose(text, NgramConfig(max_match=2, max_matches=2), 8, 1))) == {8}


def test_a_continuation_stops_where_the_text_ends() -> None:
    tree = ngram_naive.propose([1, 2, 3, 1, 2], CONFIG, 8, 8)
    assert tree.token_ids.tolist() == [3, 1, 2]
