"""Triton's interpreter, as tests use it: its products in arithmetic that no host decides, and no work done twice.

The interpreter leaves `tl.dot` to numpy's BLAS. That picks its routine by the host and by the number of rows, so a row
may have other bits alone than among others, and whether it does depends on the host. Tests of bits need products whose
every element is one fixed sequence of IEEE operations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt


def fixed_product(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike = None) -> npt.NDArray[Any]:
    """a @ b, whose elements are ((a0 * b0 + a1 * b1) + a2 * b2) + ... and so on, each step rounded to `dtype`.

    numpy's elementwise operations take part alone: they know no neighbours, and fuse nothing.

    Args:
        a: [..., m, k].
        b: [..., k, n].
        dtype: of the products and the sums; None: what numpy takes for both operands.

    Returns:
        [..., m, n].
    """
    dtype = np.result_type(a, b) if dtype is None else dtype
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    total = np.multiply(a[..., :, :1], b[..., :1, :], order="C")
    term = np.empty_like(total)
    for k in range(1, a.shape[-1]):
        np.multiply(a[..., :, k, None], b[..., k, None, :], out=term)
        np.add(total, term, out=total)
    return total


def fix_products() -> None:
    """Let the interpreter multiply by `fixed_product`: it sees numpy with another `matmul`, all others the real one."""
    from triton.runtime import interpreter

    its_numpy = ModuleType("numpy")
    vars(its_numpy).update(vars(np), matmul=fixed_product)
    interpreter.np = its_numpy


class _Kept:
    """Stands in for what would take a patch back."""

    def restore(self) -> None:
        """Nothing is taken back."""


def patch_language_once() -> None:
    """Leave `triton.language` patched once it is: the interpreter does it anew for every launch and every call of a
    device function, which is a third of its time. For processes that only ever interpret."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    # keyed by the globals of a function's module, which say what it sees of the language
    known: dict[int, dict[str, Any]] = {}

    def once(function: Any) -> _Kept:
        names = function.__globals__
        if id(names) not in known:
            patch(function)
            known[id(names)] = names
        return _Kept()

    interpreter._patch_lang = once


def leave_out_what_nobody_reads() -> None:
    """Let the interpreter neither watch for overflows of integers, whose watch it throws away unless it debugs, nor
    write down all of numpy's types anew whenever it asks for one: a third of its time."""
    from triton.language import pointer_type
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    @wraps(find)
    def found_before(of: Any) -> Any:
        # a block's elements; pointers have no name of their own
        scalar = of.scalar
        if isinstance(scalar, pointer_type):
            return find(scalar)
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = found_before
