"""The specification of `kernel.py`: all rows that have to move are read first, then written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moves(
    slots: Sequence[int], query_start_loc: Sequence[int], path: Sequence[Sequence[int]], num_sampled: Sequence[int]
) -> list[tuple[int, int]]:
    """Which slots go where: (from, to) pairs, those that stay left out; arguments as those of `kernel.kv_commit`."""
    pairs = []
    for request, rows in enumerate(path):
        root = query_start_loc[request]
        for k in range(1, min(num_sampled[request], len(rows))):
            source, target = slots[root + rows[k]], slots[root + k]
            if source >= 0 and target >= 0 and source != target:
                pairs.append((source, target))
    return pairs


def kv_commit(
    kv_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Like `kernel.kv_commit`, on the layers' caches [blocks, heads, block size, 2 * head size] themselves."""
    pairs = moves(slots.tolist(), query_start_loc.tolist(), path.tolist(), num_sampled.tolist())
    for cache in kv_caches:
        raw = cache.view(_RAW[cache.element_size()])  # as integers: a NaN keeps its bits
        size = raw.shape[2]
        held = [raw[source // size, :, source % size].clone() for source, _ in pairs]
        for (_, target), data in zip(pairs, held, strict=True):
            raw[target // size, :, target % size] = data
