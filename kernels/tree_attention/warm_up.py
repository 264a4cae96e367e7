"""Compiles what steps may launch, before there is a step that would wait for the compiler."""

from __future__ import annotations

from typing import Any

import torch
from vllm_specrollout.kernels.tree_attention.kernel import tree_attention
from vllm_specrollout.kernels.tree_attention.launch import SPLIT_SIZE, Tile, default_tile, shared_memory_of


def warm_up(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    *,
    tile: Tile | None = None,
    **options: Any,
) -> None:
    """Launch every variant of the kernel once, on a request without rows: nothing is read, and nothing written.

    Args:
        query: [1, Hq, D], of the type and strides of a step's.
        key_cache: as in steps, like all that follows.
        value_cache: [blocks, Hkv, block size, D].
        out: [1, Hq, D]; left alone.
        block_table: [1, max blocks] int32.
        tile: launch parameters, if not those of the table.
        options: `scale`, `sliding_window` and the like, as steps pass them to `tree_attention`.
    """
    no_rows = torch.zeros(2, dtype=torch.int32, device=query.device)
    no_ancestors = torch.zeros(1, dtype=torch.int64, device=query.device)
    group = query.shape[1] // key_cache.shape[1]
    own = tile or default_tile(query.dtype, query.shape[2], shared_memory_of(query.device))
    for rows, num_programs in variants(own, group):
        tree_attention(
            query, key_cache, value_cache, out, no_rows, no_rows[:1], block_table, no_rows[:1], no_ancestors,
            max_query_len=rows, max_seq_len=2 * SPLIT_SIZE, num_programs=num_programs, tile=tile, **options,
        )  # fmt: skip


def variants(tile: Tile, group: int) -> list[tuple[int, int]]:
    """(most rows of the only request, programs) of launches that together are compiled like any step's.

    Every height of a tile, with splits shared out and not; and tiles that are numbered through, which share none out.
    """
    fitting = sorted({max(1, height // group) for height in tile.block_m})
    return [*((rows, programs) for rows in fitting for programs in (1, 2)), (8 * fitting[-1], 1)]
