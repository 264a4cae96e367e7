"""Ancestor masks against a naive twin that asks every pair of nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.mask import ancestor_mask
from tests.reference.trees import path_to
from vllm_specrollout.types import ROOT


@st.composite
def parent_arrays(draw: st.DrawFn) -> np.ndarray:
    size = draw(st.integers(0, 64))
    return np.asarray([draw(st.integers(ROOT, node - 1)) for node in range(size)], dtype=np.int32)


@given(parent_arrays())
def test_a_bit_is_set_exactly_for_the_node_and_its_ancestors(parents: np.ndarray) -> None:
    mask = ancestor_mask(parents)
    assert mask.dtype == np.uint64
    assert mask.shape == (len(parents),)
    for node in range(len(parents)):
        for other in range(64):
            assert bool(int(mask[node]) >> other & 1) == (other in path_to(parents, node))


def test_the_last_bit_of_a_full_word_is_usable() -> None:
    assert int(ancestor_mask(np.arange(-1, 63, dtype=np.int32))[63]) == 2**64 - 1


def test_more_nodes_than_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="65 nodes"):
        ancestor_mask(np.full(65, ROOT, dtype=np.int32))
