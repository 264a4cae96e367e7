"""Nothing that a step may launch is left to be compiled in the middle of a rollout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from vllm_specrollout.kernels.tree_attention import kernel
from vllm_specrollout.kernels.tree_attention.launch import SPLIT_SIZE, default_tile, plan_launch
from vllm_specrollout.kernels.tree_attention.warm_up import variants, warm_up

from tests.kernels.conftest import HAS_GPU
from tests.kernels.test_tree_attention import BUSH, CHAIN_OF_5, Request, Shape, build
from tests.launches import watch


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    head_size=st.sampled_from([32, 64, 80, 128, 256]),
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 160),
    rows=st.lists(st.sampled_from([1, 1, 2, 5, 9, 10, 25, 65, 300, 4000]), min_size=1, max_size=300),
    padding=st.integers(0, 40),
    keys=st.sampled_from([1, 512, 513, 4096, 131072]),
)
def test_every_steps_launch_is_compiled_like_one_of_the_warm_up(dtype, head_size, kv_heads, group, rows, padding, keys):
    tile, padded = default_tile(dtype, head_size), max(16, triton.next_power_of_2(head_size))
    step = plan_launch(tile, sum(rows) + padding, len(rows), kv_heads, group, padded, max(rows), keys)
    warmed = [
        plan_launch(tile, 1, 1, kv_heads, group, padded, most, 2 * SPLIT_SIZE, num_programs=programs)
        for most, programs in variants(tile, group)
    ]
    compiled = {(launch.block_m, launch.search, launch.is_split) for launch in warmed}
    assert (step.block_m, step.search, step.is_split) in compiled
    # each is a form that some step takes
    assert len(compiled) == len(warmed) and not any(search and is_split for _, search, is_split in compiled)


@pytest.mark.skipif(HAS_GPU, reason="keys are noted in the interpreter")
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"softcap": 20.0}], ids=str)
def test_steps_launch_nothing_that_the_warm_up_did_not(options, monkeypatch, device) -> None:
    keys = watch(monkeypatch, (kernel, "_attend"), (kernel, "_merge"))
    shape = Shape(32, 2, 2, dtype=torch.bfloat16)
    # few and many rows and requests, an only split and several, and a prompt among decoding requests
    decoding = [Request(9), Request(20, seed=1, parents=CHAIN_OF_5), Request(30, parents=BUSH)]
    batches = [
        decoding[:1],
        decoding,
        [Request(700, parents=BUSH), *decoding],
        [Request(5, known=40), *decoding],
        [*(Request(n, seed=n) for n in range(16)), Request(0, known=300)],
    ]
    built = [build(batch, shape, device) for batch in batches]
    for batch in built:
        query, key_cache, value_cache, _, _, table, _, _ = batch.tensors
        # of the engine, whatever the step: as wide a table as any request needs
        wide = torch.zeros(table.shape[0], 64, dtype=torch.int32)
        wide[:, : table.shape[1]] = table
        batch.tensors = (*batch.tensors[:5], wide, *batch.tensors[6:])
    query, key_cache, value_cache, _, _, table, _, _ = built[0].tensors
    out = torch.full_like(query[:1], float("nan"))
    warm_up(query[:1], key_cache, value_cache, out, table[:1], scale=0.2, **options)
    assert out.isnan().all()
    warmed = set(keys)
    keys.clear()
    for batch in built:
        batch.attend(**options)
    assert {name for name, *_ in keys} == {"_attend", "_merge"}
    assert any(("SEARCH", True) in key for key in keys) and any(("IS_SPLIT", True) in key for key in keys)
    assert set(keys) <= warmed
