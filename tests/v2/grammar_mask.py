"""Stands in for vLLM's kernel that masks logits by a grammar, which does not run interpreted: for stock and for us."""

from __future__ import annotations

from typing import Any

import torch


class GrammarMask:
    """Launched like the kernel, same arguments."""

    def __getitem__(self, grid: Any) -> Any:
        return self._run

    @staticmethod
    def _run(
        logits: torch.Tensor,
        logits_stride: int,
        logits_indices: torch.Tensor,
        cu_num_logits: torch.Tensor,
        bitmask: torch.Tensor,
        bitmask_stride: int,
        vocab_size: int,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,
    ) -> None:
        bits = torch.arange(32, dtype=torch.int32)
        for mask, index in zip(bitmask, logits_indices.tolist(), strict=True):
            request, position = divmod(index, MASK_STRIDE)
            begin, end = cu_num_logits[request : request + 2].tolist()
            if begin + position < end:
                is_allowed = ((mask[:, None] >> bits) & 1).flatten()[:vocab_size].bool()
                logits[begin + position, ~is_allowed] = float("-inf")
