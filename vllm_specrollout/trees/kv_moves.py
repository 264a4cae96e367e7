"""Moves of KV cache blocks, so that the accepted nodes stand in consecutive slots of their request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specrollout.types import IntArray


@dataclass(frozen=True, slots=True)
class KVMoves:
    """Blocks that are copied whole."""

    # [C] int32: physical blocks to read
    source_blocks: IntArray
    # [C] int32: physical blocks to overwrite
    target_blocks: IntArray


NO_MOVES = KVMoves(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))


def plan_moves(
    num_accepted: IntArray,
    last_node_path: IntArray,
    first_path: IntArray,
    root: IntArray,
    path_tables: IntArray,
    block_table: IntArray,
    block_size: int,
) -> KVMoves:
    """Copies from the accepted paths' scratch blocks to the requests' own blocks.

    The first path of each request lives in the request's own blocks, so accepting it moves nothing. Blocks are copied
    whole: what stands in one before position root + 1 is equal in both, what stands behind the accepted nodes is
    overwritten before it is read.

    Args:
        num_accepted: [R] accepted nodes per request.
        last_node_path: [R] path that holds the last accepted node; ignored where nothing was accepted.
        first_path: [R] each request's first path.
        root: [R] position of each request's root.
        path_tables: [P, width] block table of each path.
        block_table: [R, blocks] the requests' own block table.
        block_size: tokens per block.
    """
    moved = np.nonzero((num_accepted > 0) & (last_node_path != first_path))[0]
    if not len(moved):
        return NO_MOVES
    sources: list[int] = []
    targets: list[int] = []
    for r in moved.tolist():
        first = (int(root[r]) + 1) // block_size
        last = (int(root[r]) + int(num_accepted[r])) // block_size
        sources += path_tables[last_node_path[r], first : last + 1].tolist()
        targets += block_table[r, first : last + 1].tolist()
    return KVMoves(np.asarray(sources, dtype=np.int32), np.asarray(targets, dtype=np.int32))
