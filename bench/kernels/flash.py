"""FlashAttention 3 over the same pages: as vLLM's backend calls it, and as the first launch of a tree's attention."""

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
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    case = inputs.case
    schedule = get_scheduler_metadata(
        batch_size=case.batch,
        max_seqlen_q=case.rows,
        max_seqlen_k=case.seq_len,
        num_heads_q=case.model.heads,
        num_heads_kv=case.model.kv_heads,
        headdim=case.model.head_size,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=inputs.query.dtype,
        cu_seqlens_q=inputs.query_start_loc,
        page_size=BLOCK_SIZE,
        causal=True,
        num_splits=num_splits,
    )
    return _call(inputs, inputs.seq_lens, causal=True, num_splits=num_splits, scheduler_metadata=schedule)


def context(inputs: AttentionInputs) -> Call:
    """Every row, root and nodes alike, sees the context and no node; the call returns (output, LSE).

    As our layers call it, FlashAttention makes its own schedule.
    """
    return _call(inputs, inputs.context_lens, causal=False, num_splits=graph_splits(), return_softmax_lse=True)


def _call(inputs: AttentionInputs, lens: torch.Tensor, **options: Any) -> Call:
    """`flash_attn_varlen_func` with all that the variants have in common."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    case = inputs.case
    keys, values = inputs.kv.transpose(1, 2).split(case.model.head_size, dim=-1)
    return functools.partial(
        flash_attn_varlen_func,
        q=inputs.query,
        k=keys,
        v=values,
        out=torch.empty_like(inputs.query),
        cu_seqlens_q=inputs.query_start_loc,
        max_seqlen_q=case.rows,
        seqused_k=lens,
        max_seqlen_k=case.seq_len,
        softmax_scale=inputs.scale,
        softcap=case.model.softcap,
        block_table=inputs.block_table,
        fa_version=3,
        **options,
    )
