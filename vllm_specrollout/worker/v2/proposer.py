"""vLLM's speculators of the V2 runner, run on rows of the target that we choose.

What belongs here: rows laid out in a speculator's own buffers, and its passes over them. vLLM would run a speculator
right after sampling, on all rows of that step, for a number of levels fixed before; here it runs when drafts are asked
for, and each level may be the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_decode_inputs

from vllm_specrollout.worker.proposing import Enough, Proposer, Seat
from vllm_specrollout.worker.v2.host import HostRequest
from vllm_specrollout.worker.waiting_rows import Rows


class CounterNoise:
    """The V2 runner's noise: a hash of a request's seed, a token's place and its id.

    Args:
        sampler: vLLM's, which knows the seeds and temperatures of the requests in its rows.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def choose(self, logits: torch.Tensor, entries: Sequence[HostRequest], depth: int) -> torch.Tensor:
        """As in `Chooses`. Unsalted, unlike vLLM's drafts: these are to meet the target's own tokens."""
        sampler, device = self._sampler, logits.device
        index_of = sampler.req_states.req_id_to_index
        # vLLM counts a token's noise by the place of the token before it
        index = torch.tensor([[index_of[e.request_id], e.length - 1 + depth] for e in entries], device=device)
        states = sampler.sampling_states
        rows, places = index[:, 0].contiguous(), index[:, 1].contiguous()
        temperature, seeds = states.temperature.gpu, states.seeds.gpu
        fp64 = sampler.use_fp64_gumbel
        return gumbel_sample(
            logits, rows, temperature, seeds, places, apply_temperature=False, is_drafting=False, use_fp64=fp64
        )


class ProposerV2(Proposer):
    """Runs the speculators of vLLM's V2 runner: heads over hidden states, and small models.

    Args:
        speculator: vLLM's, its model loaded and its attention set up.
    """

    def __init__(self, speculator: Any) -> None:
        # a small model is fed with the last token itself, a head with the hidden states before it
        self.is_model = isinstance(speculator, StandaloneARSpeculator)
        super().__init__(
            speculator,
            max_depth=speculator.num_speculative_steps,
            max_rows=speculator.max_num_tokens,
            extra=int(self.is_model),
        )
        self.most_requests = min(self.most_requests, speculator.max_num_reqs)
        self.takes_layers: bool = speculator.method == "eagle3"
        speculator.sample_draft = self._sample
        self._depth = 0

    def _sample(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the place of `DraftModelSpeculator.sample_draft`."""
        if self._depth == 0:
            raise Enough
        return self.draw(self.of_vllm.compute_draft_logits(hidden, 0))

    def _pass(
        self, seats: Sequence[Seat], rows: Rows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        speculator, device = self.of_vllm, rows.token_ids.device
        self._depth = depth
        taken = torch.from_numpy(np.concatenate(index)).to(device)
        counts = np.asarray([len(own) for own in index]) + int(self.is_model)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        with torch.inference_mode():
            lengths = self._lay_out(rows, taken, torch.from_numpy(next_tokens).to(device), starts)
            requests = torch.tensor([seat.row for seat in seats], dtype=torch.int64, device=device)
            speculator.idx_mapping.fill_(-1)
            speculator.idx_mapping[: len(seats)] = requests
            speculator.current_draft_step.fill_(0)
            speculator.draft_max_seq_len = min(int(lengths.max()) + depth, speculator.max_model_len)
            with suppress(Enough):
                self._run(starts, lengths, depth)

    def _lay_out(self, rows: Rows, taken: torch.Tensor, next_tokens: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
        """Write the rows into the speculator's buffers.

        Args:
            taken: [rows] which of them; next_tokens: [R] the tokens behind each request's; starts: [R + 1] its first.

        Returns:
            [R] int32 on the host: tokens of each request that attention sees from its last row.
        """
        speculator = self.of_vllm
        num_rows, num_requests, device = int(starts[-1]), len(starts) - 1, taken.device
        last = torch.from_numpy(starts[1:] - 1).to(device).long()
        token_ids, positions = rows.token_ids[taken], rows.positions[taken]
        if self.is_model:
            ids, places = speculator.expanded_input_ids, speculator.expanded_positions
            owner = np.repeat(np.arange(num_requests), np.diff(starts) - 1)
            at = torch.from_numpy(np.arange(len(taken)) + owner).to(device)
            ids[at], places[at] = token_ids, positions
            places[last] = (places[last - 1] + 1).clamp_(max=speculator.max_model_len - 1)
        else:
            ids, places = speculator.input_buffers.input_ids, speculator.input_buffers.positions
            ids[: num_rows - 1], places[:num_rows] = token_ids[1:], positions
            hidden = rows.hidden[taken]
            speculator.hidden_states[:num_rows] = (
                speculator.model.combine_hidden_states(hidden) if self.takes_layers else hidden
            )
        ids[last] = next_tokens
        speculator.last_token_indices.zero_()
        speculator.last_token_indices[:num_requests] = last
        buffers, lengths = speculator.input_buffers, places[last].int() + 1
        buffers.query_start_loc.fill_(num_rows)
        buffers.query_start_loc[: num_requests + 1] = torch.from_numpy(starts).to(device)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_requests] = lengths
        return lengths.cpu()

    def _run(self, starts: np.ndarray, lengths: torch.Tensor, depth: int) -> None:
        """The passes over what is laid out; may raise `Enough`."""
        speculator, num_rows, num_requests = self.of_vllm, int(starts[-1]), len(starts) - 1
        tables, buffers = speculator.block_tables, speculator.input_buffers
        requests = speculator.idx_mapping[:num_requests]
        places = speculator.expanded_positions if self.is_model else buffers.positions
        out = speculator.expanded_slot_mappings if self.is_model else None
        tables.gather_block_tables(requests, num_reqs_padded=num_requests)
        slots = tables.compute_slot_mappings(
            requests, buffers.query_start_loc[: num_requests + 1], places[:num_rows], num_rows, out=out
        )
        shape = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=num_rows, num_reqs=num_requests)
        metadata = speculator._build_attn_metadata(
            num_reqs=num_requests,
            batch_desc=shape,
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=lengths,
            step=0,
            slot_mappings=slots,
        )
        by_layer = build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
        if self.is_model:
            self._run_model(num_rows, num_requests, metadata, by_layer, lengths, depth)
        else:
            self._run_head(num_rows, num_requests, metadata, by_layer, lengths, depth)

    def _run_head(
        self, num_rows: int, num_requests: int, metadata: Any, by_layer: Any, lengths: torch.Tensor, depth: int
    ) -> None:
        speculator, buffers = self.of_vllm, self.of_vllm.input_buffers
        seq_lens = buffers.seq_lens[:num_requests].clone()
        speculator.on_prefill_begin(num_requests)
        try:
            speculator._prefill(num_requests, num_rows, metadata, by_layer, None)
        finally:
            speculator.on_prefill_end(num_requests)
        if depth < 2:
            return
        prepare_decode_inputs(
            speculator.draft_tokens[:num_requests, 0],
            seq_lens,
            torch.zeros_like(seq_lens),
            buffers,
            speculator.sample_src_positions,
            speculator.max_model_len,
            speculator.max_num_reqs,
            advance_draft_positions=speculator.advance_draft_positions,
        )
        one_each = BatchExecutionDescriptor(
            CUDAGraphMode.NONE, num_tokens=num_requests, num_reqs=num_requests, uniform_token_count=1
        )
        speculator.on_multi_step_decode_begin(num_requests)
        try:
            speculator._multi_step_decode(num_requests, False, one_each, None, lengths, depth)
        finally:
            speculator.on_multi_step_decode_end(num_requests)

    def _run_model(
        self, num_rows: int, num_requests: int, metadata: Any, by_layer: Any, lengths: torch.Tensor, depth: int
    ) -> None:
        speculator = self.of_vllm
        ids, places = speculator.expanded_input_ids[:num_rows], speculator.expanded_positions[:num_rows]
        hidden = speculator._run_model(ids, places, metadata, by_layer, None)
        speculator.draft_tokens[:num_requests, 0] = self._sample(hidden[speculator.last_token_indices[:num_requests]])
        if depth < 2:
            return
        # what vLLM calls a sequence ends before the row that the model was fed beside the target's
        batch = SimpleNamespace(
            seq_lens=speculator.input_buffers.seq_lens[:num_requests] - 1,
            idx_mapping=speculator.idx_mapping[:num_requests],
            seq_lens_cpu_upper_bound=lengths - 1,
        )
        none = torch.zeros(num_requests, dtype=torch.int32, device=ids.device)
        with _levels(speculator, depth):
            speculator._multi_step_decode(batch, none, num_requests, False, None)


@contextmanager
def _levels(speculator: Any, depth: int) -> Iterator[None]:
    """A speculator that drafts so many levels: a small model's loop asks for no number."""
    most, speculator.num_speculative_steps = speculator.num_speculative_steps, depth
    try:
        yield
    finally:
        speculator.num_speculative_steps = most
