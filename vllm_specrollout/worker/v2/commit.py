"""Brings the accepted nodes' keys and values into consecutive slots, in every layer, with one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_specrollout.kernels.kv_commit.kernel import CacheTable, kv_commit


class SlotMover:
    """Knows where the layers' caches lie."""

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self.table = CacheTable.of(kv_caches)

    def warm_up(self, width: int) -> None:
        """Compile the launch; `width` is that of the paths. No row was accepted, so nothing moves."""
        device = self.table.layers.device
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        starts = torch.zeros(2, dtype=torch.int32, device=device)
        path = torch.zeros(1, width, dtype=torch.int32, device=device)
        self.move(slots, starts, path, torch.zeros_like(starts[:1]))

    def move(
        self, slots: torch.Tensor, query_start_loc: torch.Tensor, path: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        """Args:
        slots: [rows] each row's KV slot.
        query_start_loc: [R + 1] first row of each request.
        path: [R, width] rows of the accepted path, counted from the root's.
        num_sampled: [R] how many of them count, the root's included.
        """
        kv_commit(self.table, slots, query_start_loc, path, num_sampled)
