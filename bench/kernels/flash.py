"""FlashAttention 3 over the same pages: as vLLM's backend calls it, and as the first launch of a tree's attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .inputs import AttentionInputs
from .shapes import BLOCK_SIZE
from .timing import Call


def graph_splits() -> int:
    """The number of splits that vLLM captures its graphs with."""
    from vllm.config.attention import AttentionConfig

    return int(AttentionConfig().flash_attn_max_num_splits_for_cuda_graph)


def causal(inputs: AttentionInputs) -> Call:
    """Every row sees what stands before it, as in plain decoding and in a chain.

    The schedule is made here and not in the call: vLLM makes it once a step, not once a layer.
    """
    case = inputs.case
    schedule = _schedule(
        inputs.query.device.type,
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
        num_splits=graph_splits(),
    )
    return _call(inputs, inputs.seq_lens, causal=True, scheduler_metadata=schedule)


def context(inputs: AttentionInputs) -> Call:
    """Every row, root and nodes alike, sees the context and no node; the call returns (output, LSE).

    As our layers call it, FlashAttention makes its own schedule.
    """
    return _call(inputs, inputs.context_lens, causal=False, return_softmax_lse=True)


def attend(device: str) -> Callable[..., Any]:
    """`flash_attn_varlen_func`, or what stands in for it on a CPU."""
    if device == "cpu":
        return plain
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    return flash_attn_varlen_func  # type: ignore[no-any-return]


def plain(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor,
    block_table: torch.Tensor, softmax_scale: float, causal: bool, softcap: float = 0.0,
    out: torch.Tensor | None = None, return_softmax_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """The same in PyTorch, for dry walks and tests."""
    out = torch.empty_like(q) if out is None else out
    starts, lse = cu_seqlens_q.tolist(), torch.empty(q.shape[1], q.shape[0])
    for r, length in enumerate(seqused_k.tolist()):
        rows = slice(starts[r], starts[r + 1])
        keys, values = (
            part[block_table[r].long()].flatten(0, 1)[:length].double().repeat_interleave(q.shape[1] // k.shape[2], 1)
            for part in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if causal:
            hidden = torch.arange(length)[None] > torch.arange(length - scores.shape[1], length)[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        lse[:, rows] = scores.logsumexp(-1).float()
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return (out, lse) if return_softmax_lse else out


def _schedule(device: str, **sizes: Any) -> Any:
    if device == "cpu":
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    return get_scheduler_metadata(**sizes)


def _call(inputs: AttentionInputs, lens: torch.Tensor, **options: Any) -> Call:
    """`flash_attn_varlen_func` with all that the variants have in common."""
    case = inputs.case
    keys, values = inputs.kv.transpose(1, 2).split(case.model.head_size, dim=-1)
    return functools.partial(
        attend(inputs.query.device.type),
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
        num_splits=graph_splits(),
        fa_version=3,
        **options,
    )
