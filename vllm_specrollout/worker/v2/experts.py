"""Which experts computed each token, for trainers that replay the routing (`--enable-return-routed-experts`).

vLLM keeps them per row of a step, in the rows' order, and takes what was rejected for the last of a request's rows.
That holds for chains. Of a tree the accepted rows are brought to the front first, as their keys and values are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.worker.v2.commit import SlotMover

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput


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
