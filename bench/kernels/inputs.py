"""Tensors of a shape, on any device; on `meta` they take no memory, which is what a dry run builds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .shapes import BLOCK_SIZE, Attention, Verdict, ancestor_words, tree


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one layer attends to in a step."""

    case: Attention
    query: torch.Tensor
    # [blocks, kv heads, block size, 2 * head size] bf16, one layer's cache in vLLM's layout: keys before values
    kv: torch.Tensor
    # [rows, kv heads, 2 * head size] what of it the step's own rows wrote
    own: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    # [batch, blocks per request] int32; a request's blocks are scattered over the cache
    block_table: torch.Tensor
    num_nodes: torch.Tensor
    ancestors: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        return self.kv[..., : self.case.model.head_size]

    @property
    def values(self) -> torch.Tensor:
        return self.kv[..., self.case.model.head_size :]

    @property
    def scale(self) -> float:
        return self.case.model.head_size**-0.5

    @property
    def options(self) -> dict[str, float]:
        return {"scale": self.scale, "softcap": self.case.model.softcap}

    @property
    def step(self) -> tuple[torch.Tensor, ...]:
        """What says which row sees what."""
        return self.query_start_loc, self.seq_lens, self.block_table, self.num_nodes, self.ancestors

    @property
    def context_lens(self) -> torch.Tensor:
        """[batch] keys below a request's first node."""
        return self.seq_lens - self.num_nodes


def make_attention(case: Attention, device: str) -> AttentionInputs:
    batch, model = case.batch, case.model
    blocks = batch * case.blocks
    kv = torch.empty((blocks, model.kv_heads, BLOCK_SIZE, 2 * model.head_size), dtype=torch.bfloat16, device=device)
    query = torch.empty((batch * case.rows, model.heads, model.head_size), dtype=torch.bfloat16, device=device)
    kv.normal_()
    table = torch.randperm(blocks, dtype=torch.int32, device=device).view(batch, -1)
    slots = torch.arange(case.seq_len - case.rows, case.seq_len, device=device)
    words = torch.tensor(ancestor_words(case.nodes, case.kind), dtype=torch.int64, device=device)
    return AttentionInputs(
        case=case,
        query=query.normal_(),
        kv=kv,
        own=kv[table[:, slots // BLOCK_SIZE].long(), :, slots % BLOCK_SIZE].flatten(0, 1),
        query_start_loc=torch.arange(0, query.shape[0] + 1, case.rows, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), case.seq_len, dtype=torch.int32, device=device),
        block_table=table,
        num_nodes=torch.full((batch,), case.nodes, dtype=torch.int32, device=device),
        ancestors=words.repeat(batch),
    )


def make_verdict(
    case: Verdict, device: str, vocab: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Arguments of `tree_verify` but `width`; first children carry what their parents' rows sample, others do not.

    Args:
        vocab: in place of the model's, for a small check.
        dtype: of the logits; a step's are bfloat16 unless a processor touched them.
    """
    vocab, rows = vocab or case.model.vocab, 1 + case.nodes
    logits = torch.empty((case.rows, vocab), dtype=dtype, device=device).normal_()
    parents = torch.tensor([-1, *(tree(case.nodes, "tree") + 1).tolist()], dtype=torch.int32, device=device)
    each = torch.arange(case.batch, dtype=torch.int32, device=device)
    # at temperature 0 the walk goes down the first children, to the bottom
    best = logits.argmax(-1).view(case.batch, rows)
    row = torch.arange(rows, dtype=torch.int64, device=device)
    is_second = ((row % 2 == 1) & (row >= 3)).long()
    return {
        "logits": logits,
        "request_index": each.repeat_interleave(rows, output_size=case.rows),
        "temperature": torch.zeros(case.batch, dtype=torch.float32, device=device),
        "seeds": torch.arange(case.batch, dtype=torch.int64, device=device),
        "pos": torch.arange(rows, dtype=torch.int64, device=device).repeat(case.batch),
        "draft_ids": ((best[:, parents.clamp(min=0).long()] + is_second) % vocab).reshape(-1).to(torch.int32),
        "parents": parents.repeat(case.batch),
        "cu_rows": torch.arange(0, case.rows + 1, rows, dtype=torch.int32, device=device),
    }


def make_commit(case: Verdict, device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(caches of all layers, arguments of `kv_commit` but the table): every second node was accepted."""
    rows, moved = 1 + case.nodes, 1 + case.nodes // 2
    per_request = -(-rows // BLOCK_SIZE)
    shape = (case.batch * per_request, case.model.kv_heads, BLOCK_SIZE, 2 * case.model.head_size)
    layers = [torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(case.model.layers)]
    first = torch.arange(case.batch, dtype=torch.int64, device=device) * per_request * BLOCK_SIZE
    path = torch.full((case.batch, rows), -1, dtype=torch.int32, device=device)
    path[:, :moved] = torch.arange(moved, dtype=torch.int32, device=device) * 2
    return layers, {
        "slots": (first[:, None] + torch.arange(rows, device=device)).reshape(-1),
        "query_start_loc": torch.arange(0, case.rows + 1, rows, dtype=torch.int32, device=device),
        "path": path,
        "num_sampled": torch.full((case.batch,), moved, dtype=torch.int32, device=device),
    }
