"""Attention of draft trees over their nodes, merged into attention over their contexts; `naive.py` says the whole.

Every row of a request has the same context, so FlashAttention attends to that without a mask, and returns the
logarithms of its sums. What is left is small: a node's keys and values are the step's own, side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_HEAD_SIZE = 256
"""Elements of a head; an accumulator of more would not fit into registers."""
_LANES = 64
"""Rows times heads of a tile: the least that a warpgroup's matrix instructions compute."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_lh"])
def _attend(
    query, key, value, out, lse, starts, num_nodes, ancestors, factor, cap,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh, stride_lh,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, NODES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of a request's nodes, for the query heads of one key head, against all of its nodes."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head, request = tl.program_id(1), tl.program_id(2)
    nodes = tl.load(num_nodes + request)
    first = tl.program_id(0) * ROWS
    if first >= nodes:
        return
    begin = (tl.load(starts + request + 1) - nodes).to(tl.int64)
    lane, dims, other = tl.arange(0, BLOCK_M), tl.arange(0, PADDED), tl.arange(0, NODES)
    node = first + lane // GROUP
    is_row, is_dim, is_node = (node < nodes) & (lane < ROWS * GROUP), dims < HEAD_SIZE, other < nodes
    row, head = begin + node, (kv_head * GROUP + lane % GROUP).to(tl.int64)
    element = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + (row * stride_qt + head * stride_qh)[:, None] + dims[None, :], mask=element, other=0.0)
    # the rows behind are other requests', or padding: anything may stand there, and 0 * NaN is NaN
    at, seen = begin + other, is_node[:, None] & is_dim[None, :]
    v = tl.load(value + (at * stride_vt + kv_head * stride_vh)[:, None] + dims[None, :], mask=seen, other=0.0)
    seen = is_dim[:, None] & is_node[None, :]
    k = tl.load(key + (at * stride_kt + kv_head * stride_kh)[None, :] + dims[:, None], mask=seen, other=0.0)
    if IS_INTERPRETED:  # numpy knows no bfloat16
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * factor
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2 * _LOG2E)) + 1.0))
    words = tl.load(ancestors + row, mask=is_row, other=0)
    on_path = is_node[None, :] & (((words[:, None] >> other[None, :].to(tl.int64)) & 1) == 1)
    scores = tl.where(on_path, scores * _LOG2E, float("-inf"))
    context = tl.load(lse + head * stride_lh + row, mask=is_row, other=0.0) * _LOG2E
    top = tl.maximum(context, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    context = tl.exp2(context - top)
    total = context + tl.sum(weights, 1)
    found = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    o_ptrs = out + (row * stride_ot + head * stride_oh)[:, None] + dims[None, :]
    found += tl.load(o_ptrs, mask=element, other=0.0).to(tl.float32) * context[:, None]
    tl.store(o_ptrs, (found / total[:, None]).to(out.dtype.element_ty), mask=element)


def attend_to_nodes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    starts: torch.Tensor, num_nodes: torch.Tensor, ancestors: torch.Tensor, *, scale: float, softcap: float,
    most_nodes: int,
) -> None:  # fmt: skip
    """Merge each node's attention to the nodes it sees into `out`; rows of no node stay as they are.

    A head's elements lie side by side in all of them; other strides may be any.

    Args:
        query: [T, Hq, D] bfloat16, float16 or float32; D at most `MAX_HEAD_SIZE`.
        key: [T or more, Hkv, D] of the same rows and type; so are values.
        value: [T or more, Hkv, D].
        out: [T, Hq, D] attention over each row's context, which holds the root at least; overwritten in nodes' rows.
        lse: [Hq, T] float32, natural logarithms of the sums that `out` was divided by.
        starts: [R + 1 or more] int32, first row of each request.
        num_nodes: [R] int32, how many of a request's last rows are nodes.
        ancestors: [T or more] int64, of a node's row: bit j is set if and only if node j is the node or above it.
        scale: factor of the products of queries and keys.
        softcap: c in c * tanh(score / c); 0: none.
        most_nodes: no request has more. It is compiled in, so it is the engine's, not the step's.
    """
    group, head_size = query.shape[1] // key.shape[1], query.shape[2]
    padded, block_m = max(16, triton.next_power_of_2(head_size)), max(_LANES, triton.next_power_of_2(group))
    _attend[triton.cdiv(most_nodes, block_m // group), key.shape[1], len(num_nodes)](
        query, key, value, out, lse, starts, num_nodes, ancestors, scale / softcap if softcap else scale, softcap,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2], lse.stride(0),
        HEAD_SIZE=head_size, PADDED=padded, GROUP=group, BLOCK_M=block_m,
        NODES=max(16, triton.next_power_of_2(most_nodes)), HAS_SOFTCAP=softcap > 0,
        IS_INTERPRETED=not isinstance(_attend, triton.JITFunction),
        # an accumulator of 64 x 128 elements is 64 registers of each thread of four warps
        num_warps=4 * max(1, block_m * padded // (64 * 128)),
    )  # fmt: skip
