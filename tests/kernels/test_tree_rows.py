"""Rows of drafts as the specification lays them out, over memory that holds anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from vllm_specrollout.kernels.tree_rows import kernel, naive

from bench.kernels.mask import ancestor_mask

UNWRITTEN = -1_234_567


def laid_out(seed: int, most: int, sizes: list[int], prompts: list[int], has_branches: bool, how: Any) -> list[Any]:
    draw = np.random.default_rng(seed)
    drafted = np.full((len(sizes) + 2, 3, most), UNWRITTEN, dtype=np.int32)
    rows = draw.permutation(len(drafted))[: len(sizes)]
    for row in rows:
        kept = draw.integers(0, most + 1)
        drafted[row, 0] = np.where(np.arange(most) < kept, draw.integers(0, 50, most), -1)
        is_chain = draw.random(most) < 0.6
        drafted[row, 1] = [j - 1 if is_chain[j] else draw.integers(-1, j) if j else -1 for j in range(most)]
        drafted[row, 1, kept:] = -1
    counts = np.array(sizes)
    cu_logits = np.concatenate([[0], np.cumsum(counts + 1)]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts + 1 + np.array(prompts))]).astype(np.int32)
    total = int(starts[-1])
    inputs = [torch.from_numpy(each) for each in (drafted, rows.astype(np.int64), cu_logits, starts)]
    written = [
        torch.arange(1000, 1000 + total, dtype=torch.int32),
        *(torch.full((int(cu_logits[-1]),), UNWRITTEN, dtype=torch.int32) for _ in range(2)),
        torch.full((len(sizes),), UNWRITTEN, dtype=torch.int32),
        torch.full((total,), UNWRITTEN, dtype=torch.int64),
        torch.full((total,), UNWRITTEN, dtype=torch.int32),
    ]
    how(*inputs, *written, has_branches=has_branches)
    return written


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    most=st.sampled_from([1, 3, 6, 24, 64]),
    shares=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=4),
    has_branches=st.booleans(),
)
def test_rows_are_laid_out_as_specified_and_nothing_else_is_written(
    seed: int, most: int, shares: list[tuple[float, int]], has_branches: bool
) -> None:
    sizes, prompts = [round(share * most) for share, _ in shares], [prompt for _, prompt in shares]
    ours = laid_out(seed, most, sizes, prompts, has_branches, kernel.lay_out)
    theirs = laid_out(seed, most, sizes, prompts, has_branches, naive.lay_out)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.tolist() == wanted.tolist()


def test_what_nodes_see_is_what_the_host_says_they_see() -> None:
    parents = [-1, 0, 0, 1, -1, 3, 2, 6]
    drafted = torch.tensor([[list(range(8)), parents, [0] * 8]], dtype=torch.int32)
    spare = [torch.zeros(9, dtype=torch.int32) for _ in range(4)]
    ancestors, shift = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    kernel.lay_out(
        drafted, torch.zeros(1, dtype=torch.int64), bounds, bounds, *spare, ancestors, shift, has_branches=True
    )
    assert ancestors[1:].tolist() == ancestor_mask(np.array(parents, dtype=np.int32)).tolist()
    assert shift.tolist() == [0, 0, 0, -1, -1, -4, -2, -4, -4]
