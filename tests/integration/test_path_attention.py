"""Tree attention over stock's own kernel: against float64 with an ancestor mask, bit for bit against plain decoding.

The cache is filled with NaN wherever nothing was written, scratch blocks included: whatever reads a slot that is not
its own is found out.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn

from tests.strategies import tree_parents
from tests.unlike import unlike_rows
from vllm_specrollout import _core
from vllm_specrollout.worker.rows import HeadShape, attention_alike
from vllm_specrollout.worker.v1.attention import PathAttention, PathStep, plan_paths, rows_apart

BLOCK, HEADS, KV_HEADS, DIM = 32, 4, 2, 64
LAYER = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, isa="vec")


def _impl(window: int | None) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))  # all the constructor asks for
    with mock.patch.object(cpu_attn, "get_current_vllm_config", lambda: config):
        return cpu_attn.CPUAttentionBackendImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, "auto")


def _metadata(
    query_start: np.ndarray, seq_lens: np.ndarray, tables: np.ndarray, dtype: torch.dtype, window: int | None
) -> Any:
    starts, lens = torch.from_numpy(query_start), torch.from_numpy(seq_lens)
    scheduler = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seq_lens=lens, dtype=dtype,
        query_start_loc=starts, causal=True, sliding_window_size=window or -1, isa="vec", enable_kv_split=False,
        dynamic_causal=None, kv_cache_dtype="auto",
    )  # fmt: skip
    rows = int(query_start[-1])
    return cpu_attn.CPUAttentionMetadata(
        rows, int(np.diff(query_start).max()), starts, int(seq_lens.max()), lens, torch.from_numpy(tables),
        torch.zeros(rows, dtype=torch.int64), scheduler,
    )  # fmt: skip


class _Cache:
    """A cache of one layer, all NaN but its zero block, in which a request's context has been written."""

    def __init__(self, impl: Any, num_blocks: int, dtype: torch.dtype) -> None:
        self.impl = impl
        self.blocks = torch.full((num_blocks, KV_HEADS, BLOCK, 2 * DIM), float("nan"), dtype=dtype)
        self.blocks[0] = 0.0

    def claim(self, blocks: list[int]) -> None:
        """As vLLM does with the blocks it hands out."""
        self.blocks[blocks] = 0.0

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> None:
        self.impl.do_kv_cache_update(LAYER, key, value, self.blocks, torch.tensor(slots, dtype=torch.int64))


@pytest.mark.parametrize("are_alike", [True, False], ids=["this host's rows", "rows that round by their number"])
@settings(max_examples=40, deadline=None)
@given(
    parents=tree_parents(14).filter(bool),
    context=st.integers(1, 75),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    window=st.sampled_from([None, 7, 40]),
)
def test_a_tree_attends_as_plain_decoding_would_bit_for_bit(
    are_alike: bool, parents: list[int], context: int, dtype: torch.dtype, window: int | None
) -> None:
    """Where rows are not alike, they attend one by one."""
    with pytest.MonkeyPatch.context() as patch:
        if not are_alike:
            unlike_rows.spoil(ops, patch.setattr)
        _check_tree(parents, context, dtype, window, is_apart=not (are_alike and _rows_are_alike(dtype)))


@functools.cache
def _rows_are_alike(dtype: torch.dtype) -> bool:
    shape = HeadShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=DIM, block_size=BLOCK, isa="vec")
    return attention_alike(shape, dtype)


def _check_tree(parents: list[int], context: int, dtype: torch.dtype, window: int | None, *, is_apart: bool) -> None:
    torch.manual_seed(context)
    impl, n = _impl(window), len(parents)
    rows, base = n + 1, context - 1  # the last context token is the root: its keys are written in this step
    table = list(range(1, (base + rows) // BLOCK + 2))
    q = torch.randn(rows, HEADS, DIM).to(dtype)
    k, v = (torch.randn(base + rows, KV_HEADS, DIM).to(dtype) for _ in range(2))

    cache = _Cache(impl, len(table) + 64, dtype)
    cache.claim(table)
    cache.write(k[:base], v[:base], [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(base)])
    scratch = np.arange(len(table) + 1, len(table) + 64, dtype=np.int32)
    step = PathStep()
    step.plan, raw = plan_paths(
        np.asarray([0, rows], np.int32), np.asarray([base], np.int32), np.asarray([0, n], np.int32),
        np.asarray(parents, np.int32), np.asarray([table], np.int32), BLOCK, scratch, 0,
    )  # fmt: skip
    stride = cache.blocks.stride(0) * cache.blocks.element_size()
    _core.copy_blocks(
        np.asarray([cache.blocks.data_ptr()], np.uint64), np.asarray([stride]), raw["copy_from"], raw["copy_to"]
    )
    if is_apart:
        raw = rows_apart(raw, np.asarray([0, n], np.int32))
    layer = PathAttention(impl, step)
    layer.do_kv_cache_update(LAYER, k[base:], v[base:], cache.blocks, torch.zeros(rows, dtype=torch.int64))
    out = torch.full_like(q, float("nan"))
    layer.forward(
        LAYER, q, k[base:], v[base:], cache.blocks,
        _metadata(raw["query_start"], raw["seq_lens"], raw["tables"], dtype, window), out,
    )  # fmt: skip
    for node in range(-1, n):
        path, at = [], node
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        keys = [*range(base + 1), *(base + 1 + i for i in path)]
        plain = _decode(impl, q[node + 1], k[keys], v[keys], dtype, window)
        assert torch.equal(out[node + 1], plain), f"node {node}"
        torch.testing.assert_close(
            out[node + 1].double(), _naive(q[node + 1], k[keys], v[keys], window),
            atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=2e-2,
        )  # fmt: skip


def _decode(
    impl: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, window: int | None
) -> torch.Tensor:
    """What stock computes for the last token of a plain sequence."""
    length = len(key)
    table = list(range(1, (length - 1) // BLOCK + 2))
    cache = _Cache(impl, len(table) + 1, dtype)
    cache.claim(table)
    cache.write(key, value, [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
    out = torch.empty(1, HEADS, DIM, dtype=dtype)
    metadata = _metadata(
        np.asarray([0, 1], np.int32), np.asarray([length], np.int32), np.asarray([table], np.int32), dtype, window
    )
    impl.forward(LAYER, query[None], key[-1:], value[-1:], cache.blocks, metadata, out)
    return out[0]


def _naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of one query over its keys in float64; a window counts the query itself."""
    first = max(0, len(key) - window) if window else 0
    group = HEADS // KV_HEADS
    key, value = (x[first:].double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("hd,khd->hk", query.double(), key) * DIM**-0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), value)
