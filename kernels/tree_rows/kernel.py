"""Rows of a step's drafts: which token each was computed for, what it hangs on, what it sees, and where it stands.

One program per request, in one launch before the forward pass. What was drafted lies on the device, so nobody on the
host knows it yet. A row without a draft reads token 0, and stands for a token that is never sampled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _lay_out(
    drafted_ptr, stride, rows_ptr, cu_logits_ptr, starts_ptr, input_ids_ptr,
    parents_ptr, draft_ids_ptr, num_nodes_ptr, ancestors_ptr, shift_ptr,
    MOST: tl.constexpr, NODES: tl.constexpr, HAS_BRANCHES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(cu_logits_ptr + request)
    size = tl.load(cu_logits_ptr + request + 1) - first - 1
    root = tl.load(starts_ptr + request + 1) - size - 1
    node = tl.arange(0, NODES)
    own = drafted_ptr + tl.load(rows_ptr + request).to(tl.int64) * stride
    token = tl.load(own + node, mask=node < size, other=-1)
    above = tl.load(own + MOST + node, mask=node < size, other=-1)
    is_there = token >= 0
    if not HAS_BRANCHES:
        # rows attend in their order, so what hangs elsewhere is no draft, nor is what follows it
        broken = tl.min(tl.where(is_there & (above == node - 1), NODES, node), 0)
        is_there = is_there & (node < broken)
    above = tl.where(is_there, above, -1)
    tl.store(parents_ptr + first, -1)
    tl.store(draft_ids_ptr + first, tl.load(input_ids_ptr + root))
    tl.store(parents_ptr + first + 1 + node, above + 1, mask=node < size)
    tl.store(draft_ids_ptr + first + 1 + node, tl.where(is_there, token, -1), mask=node < size)
    tl.store(input_ids_ptr + root + 1 + node, tl.maximum(token, 0), mask=node < size)
    if HAS_BRANCHES:
        seen = tl.zeros([NODES], tl.int64)
        depth = tl.zeros([NODES], tl.int32)
        one = tl.full([], 1, tl.int64)
        for j in range(MOST):
            parent = tl.sum(tl.where(node == j, above, 0), 0)
            is_above = node == parent
            seen_there = tl.sum(tl.where(is_above, seen, 0), 0)
            depth_there = tl.sum(tl.where(is_above, depth, 0), 0)
            seen = tl.where(node == j, seen_there | (one << j), seen)
            depth = tl.where(node == j, depth_there + 1, depth)
        tl.store(num_nodes_ptr + request, size)
        tl.store(ancestors_ptr + root, tl.zeros([], tl.int64))
        tl.store(shift_ptr + root, 0)
        tl.store(ancestors_ptr + root + 1 + node, seen, mask=node < size)
        tl.store(shift_ptr + root + 1 + node, depth - node - 1, mask=node < size)


def lay_out(
    drafted: torch.Tensor, rows: torch.Tensor, cu_logits: torch.Tensor, starts: torch.Tensor, input_ids: torch.Tensor,
    parents: torch.Tensor, draft_ids: torch.Tensor, num_nodes: torch.Tensor, ancestors: torch.Tensor,
    shift: torch.Tensor, *, has_branches: bool,
) -> None:  # fmt: skip
    """Lay the drafts of a step's requests out over its rows.

    Args:
        drafted: [requests' rows, 3, K] int32 tokens (-1: none), and the node that each hangs on (-1: the root); of a
            row one behind the other.
        rows: [R] int64 each request's row of `drafted`.
        cu_logits: [R + 1] int32 first row of logits of each request: its root's, then one for each draft.
        starts: [R + 1] int32 first row of each request in the step; its last ones are those with logits.
        input_ids: [rows] int32; where drafts stand it is written.
        parents: [rows of logits] int32, written: what each hangs on, counted from its request's root row; -1: a root.
        draft_ids: [rows of logits] int32, written: what each was computed for; -1: nothing that is sampled.
        num_nodes: [R] int32; ancestors: [rows] int64; shift: [rows] int32, written where there are branches: nodes of a
            request; bit j: node j is the row's node or above it; how far a row's position lies behind its place.
        has_branches: False: rows attend in their order, so only the chain from the first draft on counts.
    """
    most = drafted.shape[2]
    _lay_out[(len(rows),)](
        drafted, drafted.stride(0), rows, cu_logits, starts, input_ids,
        parents, draft_ids, num_nodes, ancestors, shift,
        MOST=most, NODES=triton.next_power_of_2(most), HAS_BRANCHES=has_branches, num_warps=1,
    )  # fmt: skip
