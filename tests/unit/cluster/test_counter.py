"""Noise that is counted: that of the specification, for any tokens of any rows, and what two ends say of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.builders import HELLO
from vllm_specrollout.cluster import counter
from vllm_specrollout.cluster.codec import encode, opened
from vllm_specrollout.cluster.counter import HASHES, TAPE, NoiseKind, gumbel
from vllm_specrollout.cluster.messages import Noise

LONGS = st.integers(-(2**63), 2**63 - 1)
PLACES = st.integers(0, 2**31 - 1)


def specified(name: str, seed: int, place: int, vocab: int) -> np.ndarray:
    """[vocab] what vLLM's sampler adds."""
    pytest.importorskip("torch", reason="the specification stands beside a kernel's")
    from vllm_specrollout.kernels.tree_verify.naive import noise32, philox_noise32

    return {"murmur": noise32, "philox": philox_noise32}[name](seed, place, vocab)


@pytest.mark.parametrize("name", HASHES)
@given(rows=st.lists(st.tuples(LONGS, PLACES), min_size=1, max_size=4), chosen=st.integers(0, 2**32 - 1))
def test_it_is_the_specifications_bit_for_bit(name: str, rows: list[tuple[int, int]], chosen: int) -> None:
    vocab, width = 400, 60
    token_ids = np.random.default_rng(chosen).integers(0, vocab, (len(rows), width), dtype=np.int32)
    seeds, places = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    found = gumbel(name, seeds, places, token_ids)
    assert found.dtype == np.float32
    for row, (seed, place) in enumerate(rows):
        np.testing.assert_array_equal(found[row], specified(name, seed, place, vocab)[token_ids[row]])


@pytest.mark.parametrize("name", HASHES)
def test_it_is_the_specifications_over_a_whole_vocabulary(name: str) -> None:
    vocab = 152_064
    token_ids = np.arange(vocab, dtype=np.int32)[None]
    found = gumbel(name, np.array([-7], np.int64), np.array([12_345], np.int64), token_ids)
    np.testing.assert_array_equal(found[0], specified(name, -7, 12_345, vocab))
    # a standard Gumbel variable has the mean 0.5772 and the variance pi^2 / 6
    assert abs(found.mean() - 0.5772) < 0.02 and abs(found.var() - np.pi**2 / 6) < 0.05


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("width", [1, 3, 50])
def test_rows_do_not_depend_on_how_many_are_computed_at_once(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    seeds, places = rng.integers(-(2**63), 2**63 - 1, 11), np.arange(11)
    token_ids = rng.integers(0, 1000, (11, width), dtype=np.int32)
    whole = gumbel(name, seeds, places, token_ids)
    monkeypatch.setattr(counter, "_BLOCK", 4 * width)
    np.testing.assert_array_equal(gumbel(name, seeds, places, token_ids), whole)
    assert gumbel(name, seeds[:0], places[:0], token_ids[:0]).shape == (0, width)


def test_two_ends_understand_what_one_says_of_its_noise() -> None:
    for kind in (TAPE, NoiseKind(Noise.NONE), *(NoiseKind(Noise.COUNTER, name) for name in HASHES)):
        assert kind.is_known
        hello = replace(HELLO, noise=kind.noise, details=kind.details)
        heard: Any = opened(encode(hello, 1, 0)).message()
        assert NoiseKind.of(heard) == kind


@pytest.mark.parametrize("details", [{}, {"hash": "sha"}, {"hash": 7}, {"hash": None}, {"hash": ["murmur"]}])
def test_a_hash_that_does_not_exist_is_not_known(details: dict[str, Any]) -> None:
    assert not NoiseKind.of(replace(HELLO, noise=Noise.COUNTER, details=details)).is_known
    assert NoiseKind.of(replace(HELLO, noise=Noise.TAPE, details=details)) == TAPE, "a tape has none"
