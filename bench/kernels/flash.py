"""FlashAttention 3 over the same pages: as vLLM's backend calls it, and as the first part of a tree's attention."""

from __future__ import annotations

import functools
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
    return _call(inputs, inputs.seq_lens, causal=True, num_splits=num_splits)


def context(inputs: AttentionInputs) -> Call:
    """Every row, root and nodes alike, sees the context and no node; the call returns (output, LSE)."""
    lens = inputs.seq_lens - inputs.num_nodes
    return _call(inputs, lens, causal=False, num_splits=graph_splits(), return_softmax_lse=True)


def merged(inputs: AttentionInputs) -> Call:
    """Tree attention in two parts: FlashAttention over the context, PyTorch over the nodes, and vLLM's merge of both.

    The second part is a few small kernels where one would do: what is above the first part's own time is an upper
    bound. Keys and values of the nodes are at hand in an engine, so they are gathered outside of the call.
    """
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    over_context, out = context(inputs), torch.empty_like(inputs.query)
    batch, nodes, model = inputs.case.batch, inputs.case.nodes, inputs.case.model
    bits = torch.arange(nodes, device=out.device)
    slots = (inputs.seq_lens[:, None] - nodes + bits).long()
    blocks = inputs.block_table.long().gather(1, slots // BLOCK_SIZE)
    # [batch, heads, nodes, head size]
    keys, values = (
        part[blocks, :, slots % BLOCK_SIZE].transpose(1, 2).repeat_interleave(model.heads // model.kv_heads, 1)
        for part in (inputs.keys, inputs.values)
    )
    is_seen = ((inputs.ancestors.view(batch, 1, -1, 1) >> bits) & 1).bool()
    query = inputs.query.unflatten(0, (batch, -1)).transpose(1, 2)

    def call() -> torch.Tensor:
        first, lse = over_context()
        scores = (query @ keys.transpose(2, 3)).float().mul_(inputs.scale).masked_fill_(~is_seen, float("-inf"))
        own_lse = scores.logsumexp(-1)
        # a root sees no node: weights of nothing are 0, not nan
        weights = (scores - own_lse.clamp(min=-1e30)[..., None]).exp_()
        own = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(0, 1).contiguous()
        merge_attn_states(out, first, lse, own, own_lse.transpose(0, 1).flatten(1).contiguous())
        return out

    return call


def _call(inputs: AttentionInputs, lens: torch.Tensor, *, causal: bool, num_splits: int, **options: Any) -> Call:
    """`flash_attn_varlen_func` with its schedule and with all that the variants have in common."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    case = inputs.case
    keys, values = inputs.kv.transpose(1, 2).split(case.model.head_size, dim=-1)
    shared = {
        "cu_seqlens_q": inputs.query_start_loc,
        "max_seqlen_q": case.rows,
        "max_seqlen_k": case.seq_len,
        "causal": causal,
        "num_splits": num_splits,
    }
    schedule = get_scheduler_metadata(
        batch_size=case.batch,
        num_heads_q=case.model.heads,
        num_heads_kv=case.model.kv_heads,
        headdim=case.model.head_size,
        cache_seqlens=lens,
        qkv_dtype=inputs.query.dtype,
        page_size=BLOCK_SIZE,
        **shared,
    )
    return functools.partial(
        flash_attn_varlen_func,
        q=inputs.query,
        k=keys,
        v=values,
        out=torch.empty_like(inputs.query),
        seqused_k=lens,
        softmax_scale=inputs.scale,
        block_table=inputs.block_table,
        scheduler_metadata=schedule,
        fa_version=3,
        **shared,
        **options,
    )
