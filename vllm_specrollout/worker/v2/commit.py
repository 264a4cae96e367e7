"""Brings the accepted nodes' keys and values into consecutive slots, in every layer, with one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.kernels.kv_commit.kernel import CacheTable, kv_commit

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput


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


class RoutedExperts:
    """Stands between a step's verdict and vLLM's snapshot of the step's routing."""

    def __init__(self, connector: AuxOutputWorkerConnector) -> None:
        # [most rows of a step, layers, experts per token] int32
        buffer = connector._capturer.device_buffer
        # to the kernel, one block of a cache with one head, whose slots are the rows
        self._mover = SlotMover([buffer.flatten(1)[None, None]])
        self._rows = torch.arange(len(buffer), device=buffer.device)
        self._prepare = connector.prepare_output
        connector.prepare_output = self._prepare_output  # type: ignore[method-assign]

    def warm_up(self, width: int) -> None:
        """Compile the launch, for paths of this width."""
        self._mover.warm_up(width)

    def keep(self, query_start_loc: torch.Tensor, path: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Bring the accepted rows to the front of their requests' rows; arguments are those of `SlotMover.move`."""
        self._mover.move(self._rows, query_start_loc, path, num_sampled)

    def _prepare_output(self, batch: InputBatch) -> PendingAuxOutput | None:
        pending = self._prepare(batch)
        if pending is not None:
            # Scheduled ahead, vLLM counts room for drafts as computed until it knows better. Only the device knows
            # where rows begin, and room that stayed empty would look like a gap. Copied with the step's tokens.
            starts = batch.positions[batch.query_start_loc[: len(pending.request_ids)]]
            pending.token_starts = starts.to("cpu", non_blocking=True).numpy()
        return pending
