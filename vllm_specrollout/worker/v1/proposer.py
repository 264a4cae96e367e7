"""vLLM's proposer of the V1 runner, run on rows of the target that we choose.

What belongs here: rows laid out as one batch of the proposer's, and as many passes as its buffers need. vLLM loads its
model, keeps its KV cache in the engine's blocks, and runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_specrollout.types import IntArray
from vllm_specrollout.worker.v1.requests import RequestEntry
from vllm_specrollout.worker.v1.waiting_rows import Rows


class Enough(Exception):
    """Drafting further costs more than it brings: leaves the proposer's loop, between two passes."""


@dataclass(slots=True)
class Seat:
    """What the runner knows of a request that is drafted for."""

    entry: RequestEntry
    # its row in the block table, and the blocks it has there
    row: int
    num_blocks: int
    # the token behind its last row: sampled last, or next in its prompt
    next_token: int


class Proposer:
    """Runs vLLM's proposer.

    Args:
        proposer: vLLM's, its model loaded.
        block_size: tokens per block of its KV cache.
        scratch: blocks that the scheduler does not know, for tokens that are only drafted; None: there are none.
    """

    def __init__(self, proposer: Any, block_size: int, scratch: IntArray | None) -> None:
        self.of_vllm = proposer
        proposer._sample_draft_tokens = self._sample
        self.draw: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.argmax(dim=-1)
        """[R, vocab] logits -> [R] int64 tokens of the next level; may raise `Enough`."""
        self.max_depth: int = proposer.num_speculative_tokens
        self.takes_hidden: bool = proposer.pass_hidden_states_to_model
        self.takes_layers: bool = proposer.method == "eagle3" and proposer.eagle3_use_aux_hidden_state
        """Whether it takes several layers' hidden states, side by side, and not the last one's."""
        self._extra = max(1, proposer.net_num_new_slots_per_request)
        self.most_requests: int = proposer.max_num_tokens // (2 + self._extra)
        """Of one batch: its buffers must hold some rows of each."""
        self._block_size = block_size
        # the first one holds zeros for the target's branches
        self._scratch: IntArray = np.zeros(0, dtype=np.int32) if scratch is None else scratch[1:]
        # [requests, width] the runner's, of the step in progress
        self.block_table: IntArray = np.zeros((0, 0), dtype=np.int32)

    @property
    def path(self) -> Path:
        """The folder that vLLM loaded the model from."""
        config = self.of_vllm.vllm_config.speculative_config.draft_model_config
        if Path(config.model).exists():
            return Path(config.model)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))

    def _sample(self, hidden: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """In the place of `SpecDecodeBaseProposer._sample_draft_tokens`."""
        return self.draw(self.of_vllm.model.compute_logits(hidden)), None

    def run(self, rows: Rows, seats: Sequence[Seat], depth: int) -> float:
        """Feed rows, at least one for each seat and in the seats' order, and draft so many levels.

        Returns:
            milliseconds that it took.
        """
        begin = time.perf_counter()
        room = self.of_vllm.max_num_tokens - self._extra * len(seats)
        ends = np.cumsum(rows.counts)
        next_tokens = np.asarray([seat.next_token for seat in seats], dtype=np.int32)
        first = ends - rows.counts
        # what does not fit into one pass: the fronts of the longest requests go ahead, and yield nothing
        while (total := int((ends - first).sum())) > room:
            longest = int((ends - first).argmax())
            count = min(total - room, int(ends[longest] - first[longest]) - 1, room)
            own = slice(int(first[longest]), int(first[longest]) + count)
            behind = rows.token_ids[own.stop : own.stop + 1].numpy()
            self._pass([seats[longest]], rows, [np.arange(own.start, own.stop)], behind, 0)
            first[longest] += count
        index = [np.arange(a, b) for a, b in zip(first.tolist(), ends.tolist(), strict=True)]
        self._pass(seats, rows, index, next_tokens, depth)
        return (time.perf_counter() - begin) * 1e3

    def _pass(
        self, seats: Sequence[Seat], rows: Rows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        taken = torch.from_numpy(np.concatenate(index))
        counts = np.asarray([len(own) for own in index])
        positions = rows.positions[taken]
        metadata = self._metadata(seats, counts, positions, depth)
        try:
            with torch.inference_mode():
                self.of_vllm.propose(
                    num_speculative_tokens=depth,
                    target_token_ids=rows.token_ids[taken],
                    target_positions=positions,
                    target_hidden_states=rows.hidden[taken],
                    next_token_ids=torch.from_numpy(next_tokens),
                    token_indices_to_sample=None,
                    common_attn_metadata=metadata,
                    sampling_metadata=None,
                )
        except Enough:
            pass

    def _metadata(
        self, seats: Sequence[Seat], counts: np.ndarray, positions: torch.Tensor, depth: int
    ) -> CommonAttentionMetadata:
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        last = positions.numpy()[starts[1:] - 1]
        table = self._table(seats, last, depth)
        owner = np.repeat(np.arange(len(seats)), counts)
        at = positions.numpy()
        slots = table[owner, at // self._block_size].astype(np.int64) * self._block_size + at % self._block_size
        query_start = torch.from_numpy(starts)
        return CommonAttentionMetadata(
            query_start_loc=query_start,
            query_start_loc_cpu=query_start.clone(),
            seq_lens=torch.from_numpy((last + 1).astype(np.int32)),
            num_reqs=len(seats),
            num_actual_tokens=len(at),
            max_query_len=int(counts.max()),
            max_seq_len=int(last.max()) + 1,
            block_table_tensor=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots),
            causal=True,
        )

    def _table(self, seats: Sequence[Seat], last: np.ndarray, depth: int) -> IntArray:
        """[R, width] block table: the requests' own blocks, and scratch for what is only drafted."""
        table = self.block_table[[seat.row for seat in seats]]
        needed = np.minimum((last + 1 + depth) // self._block_size + 1, table.shape[1])
        taken = 0
        for i, seat in enumerate(seats):
            more = max(int(needed[i]) - seat.num_blocks, 0)
            own = self._scratch[taken : taken + more]
            taken += more
            # without scratch, vLLM's null block: what is drafted so far ahead is poor, and nothing else suffers
            table[i, seat.num_blocks : seat.num_blocks + more] = 0
            table[i, seat.num_blocks : seat.num_blocks + len(own)] = own
        return table
