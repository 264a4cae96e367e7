"""Paged attention over known tokens and draft trees, in Triton; `naive.py` says the same in loops.

A row's keys are walked in an order that depends on nothing but their slots: tiles of BLOCK_N slots, gathered into
splits whose bounds are fixed. Splits are attended to apart from each other and folded in ascending order: by one
program in registers or, where that leaves the device idle, by a second kernel. The arithmetic is the same, so are the
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_specrollout.kernels.tree_attention.launch import (
    DTYPES,
    SPLIT_SIZE,
    SPLITS_PER_SIZE,
    Tile,
    default_tile,
    plan_launch,
    shared_memory_of,
)

_LOG2E = 1.4426950408889634


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_nodes: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    split_size: int = SPLIT_SIZE,
    num_programs: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Attend to the paged keys of each row's request and write the result to `out`; the host reads nothing back.

    Args:
        query: [T, Hq, D] bfloat16, float16 or float32; D at most 256.
        key_cache: [blocks, Hkv, block size, D] of the query's dtype or float8_e4m3fn; a view with last stride 1.
        value_cache: like `key_cache`.
        out: [T, Hq, D], last stride 1. Rows of no request are left alone.
        query_start_loc: [R + 1] int32, first row of each request. A request may have no rows.
        seq_lens: [R] int32, keys of each request, its rows' own included.
        block_table: [R, max blocks] int32, the blocks in which a request's key slots stand.
        num_nodes: [R] int32, how many of a request's last rows are nodes of a draft tree; at most 64.
        ancestors: [T] int64, of a node's row: bit j is set if and only if node j is the node or above it.
        scale: factor of the products of queries and keys; above 0.
        max_query_len: no request has more rows.
        max_seq_len: no request has more keys; with the shapes it decides the launch, so a graph captures the largest.
        sliding_window: keys a row sees back from its position, its own included; 0: all.
        softcap: c in c * tanh(score / c); 0: none.
        k_scale: stored keys times this are the keys.
        v_scale: stored values times this are the values.
        split_size: keys per split; part of the arithmetic.
        tile: launch parameters instead of those of the table; `block_n` is part of the arithmetic.
        num_programs: programs that share a tile's splits; None: by the shapes. The bits do not depend on it.

    Raises:
        ValueError: shapes, strides or parameters that the kernel cannot take.
    """
    num_rows, num_heads, head_size = query.shape
    num_requests, kv_heads = seq_lens.shape[0], key_cache.shape[1]
    if num_rows == 0 or num_requests == 0:
        return
    group = num_heads // kv_heads
    padded = max(16, triton.next_power_of_2(head_size))
    tile = tile or default_tile(query.dtype, head_size, shared_memory_of(query.device))
    _check(query, key_cache, value_cache, out, scale, split_size, tile)
    launch = plan_launch(
        tile, num_rows, num_requests, kv_heads, group, padded, max_query_len, max_seq_len, split_size, num_programs
    )
    parts, sums = out, out  # not read unless split
    if launch.is_split:
        parts = torch.empty(num_rows, num_heads, launch.splits, padded, dtype=torch.float32, device=query.device)
        sums = torch.empty(num_rows, num_heads, launch.splits, 2, dtype=torch.float32, device=query.device)
    common = {
        "HEAD_SIZE": head_size,
        "PADDED": padded,
        "GROUP": group,
        "SPLIT_SIZE": split_size,
        # every multiplication and addition that may be fused is spelled out: the masked and the unmasked loop, one
        # launch and two, must round alike
        "enable_fp_fusion": False,
    }
    softened = 2 * _LOG2E * scale * k_scale / softcap if softcap else 0.0
    programs = (launch.tiles, kv_heads * launch.num_programs)
    _attend[programs if launch.search else (*programs, num_requests)](
        query, key_cache, value_cache, out, parts, sums,
        query_start_loc, seq_lens, block_table, num_nodes, ancestors,
        num_requests, kv_heads, launch.num_programs, launch.splits, sliding_window,
        softcap * _LOG2E if softcap else scale * k_scale * _LOG2E, softened, v_scale,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        value_cache.stride(0), value_cache.stride(1), value_cache.stride(2),
        BLOCK_M=launch.block_m, BLOCK_N=tile.block_n, BLOCK_SIZE=key_cache.shape[2],
        HAS_WINDOW=sliding_window > 0, HAS_SOFTCAP=softcap > 0, IS_SPLIT=launch.is_split, SEARCH=launch.search,
        IS_INTERPRETED=not isinstance(_attend, triton.JITFunction),
        num_warps=launch.block_m // tile.rows_per_warp, num_stages=tile.num_stages, **common,
    )  # fmt: skip
    if launch.is_split:
        _merge[(max_query_len, num_requests, kv_heads)](
            parts, sums, out, query_start_loc, seq_lens, num_nodes,
            launch.splits, num_heads, v_scale, out.stride(0), out.stride(1),
            GROUP_PADDED=triton.next_power_of_2(group), num_warps=4, **common,
        )  # fmt: skip


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    split_size: int,
    tile: Tile,
) -> None:
    if query.dtype not in DTYPES:
        raise ValueError(f"queries of {query.dtype}: the kernel takes bfloat16, float16 and float32")
    # keys and values become what queries are; float32 loses nothing of the others
    known = (query.dtype, torch.float8_e4m3fn, *(DTYPES if query.dtype == torch.float32 else ()))
    if key_cache.dtype not in known or value_cache.dtype != key_cache.dtype:
        raise ValueError(f"keys of {key_cache.dtype} and values of {value_cache.dtype} beside queries of {query.dtype}")
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads do not share {key_cache.shape[1]} key heads evenly")
    if any(tensor.stride(-1) != 1 for tensor in (query, key_cache, value_cache, out)):
        raise ValueError("a head's elements must lie side by side: the last stride of query, caches and out is 1")
    if scale <= 0:
        raise ValueError(f"the scale must be above 0, not {scale}")
    if split_size <= 0 or split_size % tile.block_n:
        raise ValueError(f"the split size must be a multiple of {tile.block_n}, not {split_size}")


@triton.jit
def _popcount(words):
    """Set bits of int64 words."""
    x = words.to(tl.uint64, bitcast=True)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _split_size(split, SPLIT_SIZE: tl.constexpr):
    return SPLIT_SIZE << (split // SPLITS_PER_SIZE)


@triton.jit
def _split_begin(split, SPLIT_SIZE: tl.constexpr):
    doublings = split // SPLITS_PER_SIZE
    before = SPLIT_SIZE * SPLITS_PER_SIZE * ((1 << doublings) - 1)
    return before + (split % SPLITS_PER_SIZE) * (SPLIT_SIZE << doublings)


@triton.jit
def _fold(whole_max, whole_sum, whole_acc, part_max, part_sum, part_acc):
    """Add one split's result, online softmax of [rows] in units of log2; a split without keys changes no bit."""
    top = tl.maximum(whole_max, part_max)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    keep, add = tl.exp2(whole_max - pivot), tl.exp2(part_max - pivot)
    whole_sum = tl.fma(whole_sum, keep, part_sum * add)
    added = part_acc * add[:, None]
    whole_acc = tl.fma(whole_acc, keep[:, None], added)
    return top, whole_sum, whole_acc


@triton.jit
def _normalized(total, acc, v_scale):
    """Divide by the softmax's denominator; a row that sees nothing gives zeros."""
    factor = v_scale / tl.where(total > 0.0, total, 1.0)
    return acc * factor[:, None]


@triton.jit
def _dot(a, b, acc, IS_INTERPRETED: tl.constexpr):
    """acc + a @ b in float32."""
    if IS_INTERPRETED:  # numpy knows no bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _find_request(query_start_loc, num_requests, tile, ROWS: tl.constexpr):
    """The request of a tile, if request r's tiles are numbered from start(r) // ROWS + r on."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // ROWS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tiles(
    top, total, acc, begin, end, q,
    keys, values, table, stride_kb, stride_ks, stride_vb, stride_vs, exponent_scale, softened,
    limit, words, position, base, seq_len, key_begin, node_words, window,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to the key slots begin..end, in whole tiles. Unmasked, every row must see all of them."""
    dims = tl.arange(0, PADDED)
    # the masked tiles are few: buffering ahead would cost registers that the other loop needs
    for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
        slots = start + tl.arange(0, BLOCK_N)
        if MASKED:
            # what no row sees is not even loaded: it may be anything, and 0 * NaN is NaN
            present = (slots >= key_begin) & (slots < seq_len)
            block = tl.load(table + slots // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
            k_mask = present[None, :] & (dims < HEAD_SIZE)[:, None]
            v_mask = present[:, None] & (dims < HEAD_SIZE)[None, :]
        else:
            block = tl.load(table + slots // BLOCK_SIZE).to(tl.int64)
            k_mask = (dims < HEAD_SIZE)[:, None] if HEAD_SIZE != PADDED else None
            v_mask = (dims < HEAD_SIZE)[None, :] if HEAD_SIZE != PADDED else None
        offset = (slots % BLOCK_SIZE).to(tl.int64)
        k_ptrs = keys + (block * stride_kb + offset * stride_ks)[None, :] + dims[:, None]
        v_ptrs = values + (block * stride_vb + offset * stride_vs)[:, None] + dims[None, :]
        if MASKED or HEAD_SIZE != PADDED:
            k = tl.load(k_ptrs, mask=k_mask, other=0.0)
            v = tl.load(v_ptrs, mask=v_mask, other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        scores = _dot(q, k, tl.zeros([q.shape[0], BLOCK_N], tl.float32), IS_INTERPRETED)
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = 1.0 - 2.0 / (tl.exp2(scores * softened) + 1.0)
        if MASKED:
            in_tree = (slots >= base) & (slots < seq_len)
            bit = tl.where(in_tree, slots - base, 0).to(tl.int64)
            on_path = in_tree[None, :] & (((words[:, None] >> bit[None, :]) & 1) == 1)
            visible = (slots[None, :] < limit[:, None]) | on_path
            if HAS_WINDOW:
                depth = _popcount(tl.load(node_words + bit, mask=in_tree, other=0))
                at = tl.where(in_tree, base - 1 + depth, slots)
                visible = visible & (at[None, :] > (position - window)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * exponent_scale)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(
            tl.fma(scores, tl.zeros_like(scores) + exponent_scale, tl.broadcast_to(-pivot[:, None], scores.shape))
        )
        keep = tl.exp2(top - pivot)
        total = tl.fma(total, keep, tl.sum(p, 1))
        acc = _dot(p.to(q.dtype), v, acc * keep[:, None], IS_INTERPRETED)
        top = new_top
    return top, total, acc


# what changes from step to step is not compiled in: steps would wait for the compiler. Strides and sizes do not change,
# and that they divide by 16 makes loads wide
@triton.jit(do_not_specialize=["num_requests", "num_programs", "num_splits"])
def _attend(
    query, key_cache, value_cache, out, parts, sums,
    query_start_loc, seq_lens, block_table, num_nodes, ancestors,
    num_requests, kv_heads, num_programs, num_splits, window, exponent_scale, softened, v_scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_SPLIT: tl.constexpr, SEARCH: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of a request's rows, the query heads of one key head; every num_programs-th split of its keys."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(1) // kv_heads
    if SEARCH:
        request = _find_request(query_start_loc, num_requests, tile, ROWS)
        tile -= tl.load(query_start_loc + request) // ROWS + request
    else:
        request = tl.program_id(2)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    first_row = tile * ROWS
    if first_row >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    nodes = tl.load(num_nodes + request)
    base = seq_len - nodes

    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane // GROUP
    is_row = (row < query_len) & (lane < ROWS * GROUP)
    head = kv_head * GROUP + lane % GROUP
    slot = seq_len - query_len + row
    is_node = is_row & (slot >= base)
    global_row = (first + row).to(tl.int64)
    words = tl.load(ancestors + global_row, mask=is_node, other=0)
    limit = tl.where(is_row, tl.minimum(slot + 1, base), 0)
    position = tl.where(is_node, base - 1 + _popcount(words), slot)
    # slots that some row sees, and those that all do
    last_slot = seq_len - query_len + tl.minimum(first_row + ROWS, query_len) - 1
    key_end = tl.where(last_slot >= base, seq_len, last_slot + 1)
    all_end = tl.minimum(seq_len - query_len + first_row + 1, base)
    key_begin, all_begin = 0, 0
    if HAS_WINDOW:
        key_begin = tl.maximum(tl.min(tl.where(is_row, position, seq_len)) - window + 1, 0)
        all_begin = tl.maximum(tl.max(tl.where(is_row, position, 0)) - window + 1, 0)

    dims = tl.arange(0, PADDED)
    head_at = head.to(tl.int64)
    element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    q_ptrs = query + (global_row * stride_qt + head_at * stride_qh)[:, None] + dims[None, :]
    q = tl.load(q_ptrs, mask=element, other=0.0)
    keys = key_cache + kv_head.to(tl.int64) * stride_kh
    values = value_cache + kv_head.to(tl.int64) * stride_vh
    table = block_table + request.to(tl.int64) * stride_table
    node_words = ancestors + (first + query_len - nodes)
    o_ptrs = out + (global_row * stride_ot + head_at * stride_oh)[:, None] + dims[None, :]
    if not IS_SPLIT:
        whole_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        whole_sum = tl.zeros([BLOCK_M], tl.float32)
        whole_acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
    begin = _split_begin(split, SPLIT_SIZE)
    while begin < key_end:
        end = begin + _split_size(split, SPLIT_SIZE)
        # bounds of the three loops: masked by the window, unmasked, masked by window, order or tree
        lower = tl.maximum(begin, key_begin // BLOCK_N * BLOCK_N)
        upper = tl.minimum(end, key_end)
        plain_end = tl.minimum(end, all_end // BLOCK_N * BLOCK_N)
        plain_begin = tl.minimum(tl.maximum(lower, tl.cdiv(all_begin, BLOCK_N) * BLOCK_N), upper)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED], tl.float32)
        for stage in tl.static_range(0 if HAS_WINDOW else 1, 3):
            at = lower if stage == 0 else (plain_begin if stage == 1 else tl.maximum(plain_begin, plain_end))
            to = plain_begin if stage == 0 else (plain_end if stage == 1 else upper)
            top, total, acc = _attend_tiles(
                top, total, acc, at, to, q,
                keys, values, table, stride_kb, stride_ks, stride_vb, stride_vs, exponent_scale, softened,
                limit, words, position, base, seq_len, key_begin, node_words, window,
                HEAD_SIZE, PADDED, BLOCK_N, BLOCK_SIZE, stage != 1, HAS_WINDOW, HAS_SOFTCAP, IS_INTERPRETED,
            )  # fmt: skip
        if not IS_SPLIT:
            whole_top, whole_sum, whole_acc = _fold(whole_top, whole_sum, whole_acc, top, total, acc)
        elif seq_len <= SPLIT_SIZE:  # the only split: folding it into nothing would change no bit
            tl.store(o_ptrs, _normalized(total, acc, v_scale).to(out.dtype.element_ty), mask=element)
        else:
            index = (global_row * (kv_heads * GROUP) + head_at) * num_splits + split
            tl.store(sums + index * 2, top, mask=is_row)
            tl.store(sums + index * 2 + 1, total, mask=is_row)
            seen = is_row & (top > float("-inf"))
            tl.store(parts + (index * PADDED)[:, None] + dims[None, :], acc, mask=seen[:, None])
        split += num_programs
        begin = _split_begin(split, SPLIT_SIZE)
    if not IS_SPLIT:
        tl.store(o_ptrs, _normalized(whole_sum, whole_acc, v_scale).to(out.dtype.element_ty), mask=element)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    parts, sums, out, query_start_loc, seq_lens, num_nodes, num_splits, num_heads, v_scale, stride_ot, stride_oh,
    HEAD_SIZE: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
):  # fmt: skip
    """Fold the splits of one row, the query heads of one key head."""
    row, request, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    seq_len = tl.load(seq_lens + request)
    if row >= query_len or seq_len <= SPLIT_SIZE:
        return
    slot = seq_len - query_len + row
    key_end = tl.where(slot >= seq_len - tl.load(num_nodes + request), seq_len, slot + 1)
    global_row = (first + row).to(tl.int64)
    lane = tl.arange(0, GROUP_PADDED)
    is_head = lane < GROUP
    head = (kv_head * GROUP + lane).to(tl.int64)
    dims = tl.arange(0, PADDED)
    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, PADDED], tl.float32)
    split = 0
    while _split_begin(split, SPLIT_SIZE) < key_end:
        index = (global_row * num_heads + head) * num_splits + split
        part_top = tl.load(sums + index * 2, mask=is_head, other=float("-inf"))
        part_total = tl.load(sums + index * 2 + 1, mask=is_head, other=0.0)
        seen = part_top > float("-inf")  # what nothing was seen of was not written
        part_acc = tl.load(parts + (index * PADDED)[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        top, total, acc = _fold(top, total, acc, part_top, part_total, part_acc)
        split += 1
    result = _normalized(total, acc, v_scale).to(out.dtype.element_ty)
    element = is_head[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(out + (global_row * stride_ot + head * stride_oh)[:, None] + dims[None, :], result, mask=element)
