"""FlashAttention 3 over the same pages: as vLLM's backend calls it, and as the first part of a tree's attention."""

from __future__ import annotations

from typing import Any

import torch

from .inputs import AttentionInputs
from .shapes import BLOCK_SIZE
from .timing import Call

AUTO = 0
"""Number of splits: FlashAttention decides, as where vLLM captures no graph."""


def graph_splits() -> int:
    """The number of splits that vLLM captures its graphs with."""
    from vllm.config.attention import AttentionConfig

    return int(AttentionConfig().flash_attn_max_num_splits_for_cuda_graph)


def causal(inputs: AttentionInputs, num_splits: int) -> Call:
    """Every row sees what stands before it, as in plain decoding and in a chain.

    The schedule is made here and not in the call: vLLM makes it once a step, not once a layer.
    """
    out, call = _call(inputs, inputs.seq_lens, is_causal=True, num_splits=num_splits)
    return lambda: call(out=out)


def context(inputs: AttentionInputs) -> tuple[torch.Tensor, Call]:
    """Every row, root and nodes alike, sees the context and no node: (the output, a call that returns its LSE)."""
    lens = inputs.seq_lens - inputs.num_nodes
    out, call = _call(inputs, lens, is_causal=False, num_splits=graph_splits())
    return out, lambda: call(out=out, return_softmax_lse=True)[1]


def merged(inputs: AttentionInputs) -> tuple[torch.Tensor, Call]:
    """Tree attention in two parts: FlashAttention over the context, PyTorch over the nodes, and vLLM's merge of both.

    The second part is a few small kernels where one would do: what is above the first part's own time is an upper
    bound. Keys and values of the nodes are at hand in an engine, so they are gathered outside of the call.
    """
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    first, lse_of_context = context(inputs)
    out = torch.empty_like(first)
    batch, nodes = len(inputs.seq_lens), inputs.max_query_len - 1
    group = inputs.query.shape[1] // inputs.cache.keys.shape[1]
    slots = (inputs.seq_lens[:, None] - nodes + torch.arange(nodes, device=out.device)).long()
    blocks = inputs.cache.block_table.long().gather(1, slots // BLOCK_SIZE)
    # [batch, heads, nodes, head size]
    keys, values = (
        part[blocks, :, slots % BLOCK_SIZE].transpose(1, 2).repeat_interleave(group, 1)
        for part in (inputs.cache.keys, inputs.cache.values)
    )
    bits = torch.arange(nodes, device=out.device)
    is_seen = ((inputs.ancestors.view(batch, 1, -1, 1) >> bits) & 1).bool()
    query = inputs.query.unflatten(0, (batch, -1)).transpose(1, 2)

    def call() -> None:
        lse = lse_of_context()
        scores = (query @ keys.transpose(2, 3)).float().mul_(inputs.scale).masked_fill_(~is_seen, float("-inf"))
        own_lse = scores.logsumexp(-1)
        # a root sees no node: weights of nothing are 0, not nan
        weights = (scores - own_lse.clamp(min=-1e30)[..., None]).exp_()
        own = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(0, 1).contiguous()
        merge_attn_states(out, first, lse, own, own_lse.transpose(0, 1).flatten(1).contiguous())

    return out, call


def _call(inputs: AttentionInputs, lens: torch.Tensor, *, is_causal: bool, num_splits: int) -> tuple[torch.Tensor, Any]:
    """(an output, `flash_attn_varlen_func` with all that the variants have in common)."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    keys, values = inputs.cache.kv.transpose(1, 2).split(inputs.query.shape[-1], dim=-1)
    schedule = get_scheduler_metadata(
        batch_size=len(lens),
        max_seqlen_q=inputs.max_query_len,
        max_seqlen_k=inputs.max_seq_len,
        num_heads_q=inputs.query.shape[1],
        num_heads_kv=keys.shape[2],
        headdim=inputs.query.shape[2],
        cache_seqlens=lens,
        qkv_dtype=inputs.query.dtype,
        cu_seqlens_q=inputs.query_start_loc,
        page_size=BLOCK_SIZE,
        causal=is_causal,
        num_splits=num_splits,
    )

    def call(**options: Any) -> Any:
        return flash_attn_varlen_func(
            q=inputs.query,
            k=keys,
            v=values,
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=inputs.scale,
            causal=is_causal,
            block_table=inputs.cache.block_table,
            scheduler_metadata=schedule,
            num_splits=num_splits,
            fa_version=3,
            **options,
        )

    return torch.empty_like(inputs.query), call
