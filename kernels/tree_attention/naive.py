"""Specification of a step's attention with draft trees: what it computes, in loops and float64."""

from __future__ import annotations

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
    softcap: float = 0.0,
) -> torch.Tensor:
    """[T, Hq, D] float64, zeros in rows of no request.

    Args:
        query: [T, Hq, D].
        key_cache: [blocks, Hkv, block size, D] of all tokens and nodes; so are values.
        value_cache: [blocks, Hkv, block size, D].
        query_start_loc: [R + 1] first row of each request.
        seq_lens: [R] keys of each request, its rows' own included.
        block_table: [R, max blocks] the blocks in which a request's key slots stand.
        num_nodes: [R] how many of a request's last rows are nodes of a draft tree.
        ancestors: [T] int64, of a node's row: bit j is set if and only if node j is the node or above it.
        scale: factor of the products of queries and keys.
        softcap: c in c * tanh(score / c); 0: none.
    """
    group = query.shape[1] // key_cache.shape[1]
    block_size = key_cache.shape[2]
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for request, seq_len in enumerate(seq_lens.tolist()):
        begin, end = query_start_loc[request : request + 2].tolist()
        slots = torch.arange(seq_len, device=query.device)
        blocks = block_table[request][slots // block_size].long()
        # [keys, Hq, D]
        keys = key_cache[blocks, :, slots % block_size].double().repeat_interleave(group, dim=1)
        values = value_cache[blocks, :, slots % block_size].double().repeat_interleave(group, dim=1)
        words = ancestors[begin:end].tolist()
        for row in range(begin, end):
            visible = visible_slots(row - begin, words, seq_len, int(num_nodes[request]))
            scores = torch.einsum("hd,khd->hk", query[row].double(), keys[visible]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            result[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[visible])
    return result


def visible_slots(row: int, words: list[int], seq_len: int, num_nodes: int) -> list[int]:
    """Key slots that a request's row sees, ascending; `words` are the ancestors of all the request's rows."""
    if row < len(words) - num_nodes:
        return list(range(seq_len - len(words) + row + 1))
    base = seq_len - num_nodes  # slot of node 0
    return [*range(base), *(base + j for j in range(num_nodes) if words[row] >> j & 1)]
