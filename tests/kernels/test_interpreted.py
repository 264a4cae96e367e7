"""The interpreter's products and types: what tests of bits rest on where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from tests.interpreted import fixed_product

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")

F32 = npt.NDArray[np.float32]


@triton.jit
def _multiply(a, b, added, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    at = m * N + n
    product = tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n), tl.load(added + at))
    tl.store(out + at, product)


def matrices(m: int, k: int, n: int, seed: int) -> tuple[F32, F32]:
    """Of magnitudes so different that any other order of summation shows."""
    numbers = np.random.default_rng(seed)
    a, b = (numbers.standard_normal(shape) * 4.0 ** numbers.integers(-6, 7, shape) for shape in ((m, k), (k, n)))
    return a.astype(np.float32), b.astype(np.float32)


def one_by_one(a: F32, b: F32) -> F32:
    """The product, a number at a time."""
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    for i, j in np.ndindex(out.shape):
        total: Any = a[i, 0] * b[0, j]
        for k in range(1, a.shape[1]):
            total = total + a[i, k] * b[k, j]
        out[i, j] = total
    return out


@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 16), (16, 64, 8), (64, 16, 32)])
def test_a_kernels_product_is_summed_from_left_to_right(m: int, k: int, n: int) -> None:
    a, b = matrices(m, k, n, seed=m)
    added, _ = matrices(m, n, 1, seed=k)
    out = torch.full((m, n), float("nan"))
    _multiply[(1,)](*map(torch.from_numpy, (a, b, added)), out, M=m, K=k, N=n)
    np.testing.assert_array_equal(out.numpy(), one_by_one(a, b) + added)


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 40), k=st.integers(1, 90), n=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_an_element_knows_no_neighbours(m: int, k: int, n: int, seed: int, data: st.DataObject) -> None:
    """Whatever rows and columns are multiplied beside it, and however the numbers lie in memory."""
    a, b = matrices(m, k, n, seed)
    whole = fixed_product(a, b)
    rows = sorted(data.draw(st.sets(st.integers(0, m - 1), min_size=1)))
    columns = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    np.testing.assert_array_equal(fixed_product(a[rows], b[:, columns]), whole[np.ix_(rows, columns)])
    np.testing.assert_array_equal(fixed_product(np.asfortranarray(a), np.asfortranarray(b)), whole)


def test_products_are_summed_in_the_type_asked_for() -> None:
    a, b = matrices(3, 50, 2, seed=1)
    half = fixed_product(a.astype(np.float16), b.astype(np.float16), dtype=np.float32)
    assert half.dtype == np.float32
    np.testing.assert_array_equal(
        half, one_by_one(a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32))
    )
    stacked = fixed_product(np.stack([a, a + 1]), np.stack([b, b]))
    np.testing.assert_array_equal(stacked, np.stack([fixed_product(a, b), fixed_product(a + 1, b)]))


SCALARS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32)


@pytest.mark.parametrize("scalar", [*SCALARS, *map(tl.pointer_type, SCALARS)], ids=str)
def test_remembered_types_are_those_that_the_interpreter_finds(scalar: Any) -> None:
    from triton.runtime import interpreter

    for of in (scalar, tl.block_type(scalar, [4, 2])):
        for _ in range(2):
            assert interpreter._get_np_dtype(of) == interpreter._get_np_dtype.__wrapped__(of)
