"""Specification of the kernel: what it computes, in loops and float64."""

from __future__ import annotations

import math

import torch


def naive_tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_nodes: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """[T, Hq, D] float64, zeros in rows of no request. Arguments are those of `kernel.tree_attention`."""
    group = query.shape[1] // key_cache.shape[1]
    block_size = key_cache.shape[2]
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for request, seq_len in enumerate(seq_lens.tolist()):
        begin, end = query_start_loc[request : request + 2].tolist()
        if begin == end:
            continue
        slots = torch.arange(seq_len)
        blocks = block_table[request].cpu()[slots // block_size].long()
        # [keys, Hq, D]
        keys = key_cache[blocks, :, slots % block_size].double().repeat_interleave(group, dim=1) * k_scale
        values = value_cache[blocks, :, slots % block_size].double().repeat_interleave(group, dim=1) * v_scale
        words = ancestors[begin:end].tolist()
        for row in range(begin, end):
            visible = visible_slots(row - begin, words, seq_len, int(num_nodes[request]), sliding_window)
            scores = torch.einsum("hd,khd->hk", query[row].double(), keys[visible]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            result[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[visible])
    return result


def visible_slots(row: int, words: list[int], seq_len: int, num_nodes: int, sliding_window: int) -> list[int]:
    """Key slots that a request's row sees, ascending; `words` are the ancestors of all the request's rows."""
    base = seq_len - num_nodes  # slot of node 0
    first_node = len(words) - num_nodes  # its row
    nodes = [word & (2**64 - 1) for word in words[first_node:]]

    def position(slot: int) -> int:
        """Nodes stand as far behind the root, which is in slot base - 1, as they are deep."""
        return slot if slot < base else base - 1 + nodes[slot - base].bit_count()

    own = seq_len - len(words) + row
    if row < first_node:
        seen = list(range(own + 1))
    else:
        word = nodes[row - first_node]
        seen = [*range(base), *(base + j for j in range(num_nodes) if word >> j & 1)]
    window = sliding_window or math.inf
    return [slot for slot in seen if position(slot) > position(own) - window]
