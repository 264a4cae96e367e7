"""Launch of a step: the table of tiles, and what follows from a step's shapes. Nothing is tuned at run time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SPLIT_SIZE = 512
"""Keys of each of the first splits. Part of a row's arithmetic: another size rounds differently."""
SPLITS_PER_SIZE = tl.constexpr(8)
"""After so many splits of one size the next ones are twice as long: long contexts need few partial results."""
MAX_WORKSPACE_BYTES = 256 << 20
"""Partial results that would take more are folded in registers instead."""
MAX_PROGRAMS = 8192
"""Programs to aim at when splits are shared out. Many of them find no keys and leave; that is not free either."""
MAX_HEAD_SIZE = 256
"""Elements of a head; two accumulators of more would not fit into registers."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters. `block_n` is part of a row's arithmetic; the number of query rows must not be."""

    block_n: int
    """Keys a program holds at once."""
    block_m: tuple[int, ...]
    """Query rows times heads a program may hold, ascending."""
    rows_per_warp: int
    num_stages: int
    shared_memory: int = 0
    """Bytes that a device must give one program: as much as any GPU that it is for needs, or the least of these has."""


# Hopper, by padded head size. 64 is the least its warpgroup instructions compute: decoding reads memory while the idle
# lanes compute nothing of use, and since every height is made of the same instructions, a row's bits do not tell which
# it was in. Stages fit K, V and Q of two programs (one at 256) into 227 KiB of shared memory; at 256 a taller tile
# would spill the two accumulators. Devices with less than that tile needs have no warpgroup instructions: they get one
# of half the height, whose accumulators they hold.
_TILES = {
    64: (Tile(block_n=64, block_m=(64, 128), rows_per_warp=16, num_stages=4, shared_memory=99 << 10),),
    128: (Tile(block_n=64, block_m=(64, 128), rows_per_warp=16, num_stages=3, shared_memory=99 << 10),),
    256: (
        Tile(block_n=64, block_m=(64,), rows_per_warp=8, num_stages=2, shared_memory=164 << 10),
        Tile(block_n=64, block_m=(32,), rows_per_warp=4, num_stages=2, shared_memory=99 << 10),
    ),
}
# float32 has no tensor cores: small tiles keep the unrolled products short
_FLOAT32_TILE = Tile(block_n=32, block_m=(16,), rows_per_warp=4, num_stages=1, shared_memory=99 << 10)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of queries."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a step's rows are shared out among programs: by the shapes alone. The first two are compiled in."""

    block_m: int
    search: bool
    """Tiles are numbered through, and each finds its request."""
    tiles: int
    """Of the request with most rows, or of all requests if `search`."""
    splits: int
    num_programs: int
    """That share a tile's splits; more than one is compiled in as well."""

    @property
    def is_split(self) -> bool:
        return self.num_programs > 1


def plan_launch(
    tile: Tile,
    num_rows: int,
    num_requests: int,
    kv_heads: int,
    group: int,
    padded: int,
    max_query_len: int,
    max_seq_len: int,
    split_size: int = SPLIT_SIZE,
    num_programs: int | None = None,
) -> Launch:
    """The launch for a step of these shapes; arguments as of `tree_attention`, `padded` is its padded head size."""
    block_m = _block_m(tile, max_query_len * group, group)
    rows_per_tile = block_m // group
    tiles = triton.cdiv(max_query_len, rows_per_tile)
    # with rows distributed unevenly, tiles are numbered through and each finds its request
    tiles_of_all = num_rows // rows_per_tile + num_requests
    search = tiles * num_requests > 2 * tiles_of_all
    splits = num_splits(max_seq_len, split_size)
    if num_programs is None:
        enough = max(1, MAX_PROGRAMS // (tiles * num_requests * kv_heads))
        too_large = num_rows * kv_heads * group * splits * (padded + 2) * 4 > MAX_WORKSPACE_BYTES
        num_programs = 1 if search or too_large else enough
    return Launch(block_m, search, tiles_of_all if search else tiles, splits, min(num_programs, splits))


def default_tile(dtype: torch.dtype, head_size: int, shared_memory: int = 227 << 10) -> Tile:
    """The table's launch parameters for queries of this type, on a device that gives a program so many bytes.

    Raises:
        ValueError: the kernel takes no such queries, there or anywhere.
    """
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"heads of {head_size} elements, where the tree kernel takes {MAX_HEAD_SIZE}")
    if dtype not in DTYPES:
        raise ValueError(f"queries of {dtype}: the kernel takes bfloat16, float16 and float32")
    tiles = (_FLOAT32_TILE,) if dtype == torch.float32 else _TILES[max(64, triton.next_power_of_2(head_size))]
    fitting = next((tile for tile in tiles if tile.shared_memory <= shared_memory), None)
    if fitting is None:
        raise ValueError(
            f"heads of {head_size} elements, for which the tree kernel needs {tiles[-1].shared_memory >> 10} KiB of"
            f" shared memory, where the device has {shared_memory >> 10}"
        )
    return fitting


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that a device gives one program; as much as any has where kernels are interpreted."""
    if device.type == "cpu":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def _block_m(tile: Tile, rows: int, group: int) -> int:
    """The least height that holds a request's rows and heads, or the greatest; a whole group at least."""
    height = next((height for height in tile.block_m if height >= rows), tile.block_m[-1])
    return max(height, triton.next_power_of_2(group))


def num_splits(num_keys: int, split_size: int) -> int:
    begin, count = 0, 0
    while begin < num_keys:
        begin += split_size << (count // SPLITS_PER_SIZE.value)
        count += 1
    return max(1, count)
