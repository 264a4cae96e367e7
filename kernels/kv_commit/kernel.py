"""Brings accepted nodes' keys and values into consecutive slots, in all layers with one launch, in place.

In place is safe: a path is strictly increasing, so its k-th row is at or behind row k, and one program moves its share
of a request's slots in the order of k. What step k overwrites (slot k) lies before everything that later steps read
(slots path[k + 1] > k and on). Programs of different layers, heads and requests touch different memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_INTEGERS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_TILE = 1024
"""Most integers that a program moves at a time: eight for each of its 128 threads."""

# columns of the layer table
_BASE, _BLOCK_STRIDE, _HEAD_STRIDE, _SLOT_STRIDE, _HEADS, _UNITS, _COLUMNS = (tl.constexpr(i) for i in range(7))


@dataclass(frozen=True, slots=True)
class CacheTable:
    """Where the layers' caches lie, as the kernel wants to know it. Make it with `of`."""

    layers: torch.Tensor
    """[layers, 6] int64 on the caches' device: address of the first byte; strides of a block, a head and a slot; number
    of heads; size of one slot of one head. Strides and sizes in units."""
    unit: int
    """Bytes moved at a time (1, 2, 4 or 8): the most that divides every layer's address, strides and size."""
    block_size: int
    """Slots per block."""
    most_heads: int
    most_units: int
    caches: tuple[torch.Tensor, ...]
    """The caches themselves, for as long as their addresses are in use."""

    @classmethod
    def of(cls, kv_caches: Sequence[torch.Tensor]) -> CacheTable:
        """Look the caches up. Waits for the device, so not in a step; again if the caches are allocated anew.

        Args:
            kv_caches: per layer [blocks, heads, block size, 2 * head size], any dtype of 1, 2, 4 or 8 bytes, any
                strides but for the last, which is 1. Layers that share a cache may name it several times.

        Raises:
            ValueError: there are none, or one has another rank, last stride, block size or device.
        """
        if not kv_caches:
            raise ValueError("there are no KV caches to move anything in")
        first = kv_caches[0]
        distinct: dict[tuple[int, ...], torch.Tensor] = {}
        for layer, cache in enumerate(kv_caches):
            if cache.ndim != 4:
                raise ValueError(
                    f"the KV cache of layer {layer} has shape {tuple(cache.shape)}, "
                    "not [blocks, heads, block size, 2 * head size]"
                )
            if cache.shape[3] > 1 and cache.stride(3) != 1:
                raise ValueError(
                    f"one slot of the KV cache of layer {layer} is not contiguous: its last stride is "
                    f"{cache.stride(3)}, not 1"
                )
            if cache.element_size() not in _INTEGERS:
                raise ValueError(f"the KV cache of layer {layer} has elements of {cache.element_size()} bytes")
            if cache.shape[2] != first.shape[2] or cache.device != first.device:
                raise ValueError(
                    f"the KV cache of layer {layer} has {cache.shape[2]} slots per block on {cache.device}, "
                    f"that of layer 0 {first.shape[2]} on {first.device}"
                )
            # moved twice, a shared cache would be overwritten by one program while the other still reads
            distinct.setdefault((cache.data_ptr(), *cache.shape, *cache.stride()[:3]), cache)
        rows = [_row(cache) for cache in distinct.values()]
        unit = next(
            size for size in (8, 4, 2, 1) if all(byte % size == 0 for row in rows for byte in row[:4] + row[5:])
        )
        table = [
            [base, *(stride // unit for stride in strides), heads, size // unit] for base, *strides, heads, size in rows
        ]
        return cls(
            torch.tensor(table, dtype=torch.int64, device=first.device),
            unit,
            first.shape[2],
            max(row[4] for row in table),
            max(row[5] for row in table),
            tuple(distinct.values()),
        )


def _row(cache: torch.Tensor) -> list[int]:
    """One layer's line of the table, in bytes."""
    size = cache.element_size()
    return [cache.data_ptr(), *(size * cache.stride(i) for i in range(3)), cache.shape[1], size * cache.shape[3]]


@triton.jit(do_not_specialize=["path_stride", "width", "block_size"])
def _move(
    layers_ptr,
    slots_ptr,
    query_start_loc_ptr,
    path_ptr,
    path_stride,
    num_sampled_ptr,
    width,
    block_size,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid (layers, requests, chunks of HEADS heads). UNITS: a power of two, no less than any layer's."""
    request = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(num_sampled_ptr + request), width)
    if count < 2:
        return
    layer_ptr = layers_ptr + tl.program_id(0) * _COLUMNS
    cache_ptr = tl.load(layer_ptr + _BASE).to(tl.pointer_type(UNIT))
    block_stride = tl.load(layer_ptr + _BLOCK_STRIDE)
    slot_stride = tl.load(layer_ptr + _SLOT_STRIDE)
    heads = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    mine = (heads < tl.load(layer_ptr + _HEADS)) & (units < tl.load(layer_ptr + _UNITS))
    share_ptr = cache_ptr + heads * tl.load(layer_ptr + _HEAD_STRIDE) + units

    root_ptr = slots_ptr + tl.load(query_start_loc_ptr + request)
    for k in range(1, count):
        source = tl.load(root_ptr + tl.load(path_ptr + request * path_stride + k)).to(tl.int64)
        target = tl.load(root_ptr + k).to(tl.int64)
        # negative slots are padding
        if (source >= 0) & (target >= 0) & (source != target):
            source_offset = source // block_size * block_stride + source % block_size * slot_stride
            target_offset = target // block_size * block_stride + target % block_size * slot_stride
            data = tl.load(share_ptr + source_offset, mask=mine)
            tl.store(share_ptr + target_offset, data, mask=mine)
            # no thread overwrites, steps later, what another has still to read
            tl.debug_barrier()


def kv_commit(
    table: CacheTable,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Copy each accepted row's slot over the slot of its place in the path, in every layer.

    For k from 1 to num_sampled[r] - 1: slot `slots[root + path[r, k]]` goes to slot `slots[root + k]`, where root is
    `query_start_loc[r]`, the request's first row in a step that decodes. Requests with num_sampled 0 (padding, or a
    prompt still being read) or 1 are left alone, whatever their first row is. Nothing waits for the device.

    Args:
        table: the layers.
        slots: [T] int64 each row's slot, block * block size + offset; negative: none, and nothing moves there.
        query_start_loc: [>= R + 1] int32 first row of each request.
        path: [R, width] int32 accepted rows counted from the root's: path[r, 0] = 0, strictly increasing for the first
            num_sampled[r].
        num_sampled: [R] int32.

    Raises:
        ValueError: the last three do not fit each other.
    """
    num_reqs, width = path.shape
    if num_sampled.shape[0] != num_reqs or query_start_loc.shape[0] <= num_reqs:
        raise ValueError(
            f"paths of {num_reqs} requests, but {num_sampled.shape[0]} counts and {query_start_loc.shape[0]} row starts"
        )
    if not num_reqs or width < 2:
        return
    units = triton.next_power_of_2(table.most_units)
    heads = min(triton.next_power_of_2(table.most_heads), max(1, _TILE // units))
    _move[(table.layers.shape[0], num_reqs, triton.cdiv(table.most_heads, heads))](
        table.layers,
        slots.contiguous(),
        query_start_loc.contiguous(),
        path if path.stride(1) == 1 else path.contiguous(),
        path.stride(0) if path.stride(1) == 1 else width,
        num_sampled.contiguous(),
        width,
        table.block_size,
        UNIT=_INTEGERS[table.unit],
        HEADS=heads,
        UNITS=units,
    )
