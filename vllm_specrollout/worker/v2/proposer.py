"""vLLM's speculators of the V2 runner, run on rows of the target that we choose.

What belongs here: rows laid out in a speculator's own buffers, and its passes over them. vLLM would run a speculator
right after sampling, on all rows of that step, for a number of levels fixed before; here it runs when drafts are asked
for, and each level may be the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import DraftMode, IntArray, VerifyResult
from vllm_specrollout.worker.common import with_model
from vllm_specrollout.worker.models.drafter import ModelDrafter, join, tell
from vllm_specrollout.worker.models.proposing import (
    Enough,
    Proposer,
    Rows,
    Seat,
    check_layers,
    without_adapters,
)
from vllm_specrollout.worker.v2.from_host import DraftedByHost
from vllm_specrollout.worker.v2.host import HostRequest, InFlight
from vllm_specrollout.worker.v2.speculators import (
    HEADS,
    MODELS,
    attention_of,
    decode_head,
    draft_logits,
    hidden_for_heads,
    levels,
    made,
    prepare_decode_inputs,
)


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
        self.is_model = isinstance(speculator, MODELS)
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
        return self.draw(draft_logits(self.of_vllm, hidden))

    def _pass(
        self, seats: Sequence[Seat], rows: Rows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        speculator, device = self.of_vllm, rows.token_ids.device
        self._depth = depth
        taken = torch.from_numpy(np.concatenate(index)).to(device)
        counts = np.asarray([len(own) for own in index]) + int(self.is_model)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        # what attention sees from each request's last row, at most: the device is not asked for it
        most = [min(seat.next_position + int(self.is_model), speculator.max_model_len) for seat in seats]
        lengths = torch.tensor(most, dtype=torch.int32)
        with torch.inference_mode():
            self._lay_out(rows, taken, torch.from_numpy(next_tokens).to(device), starts)
            requests = torch.tensor([seat.row for seat in seats], dtype=torch.int64, device=device)
            speculator.idx_mapping.fill_(-1)
            speculator.idx_mapping[: len(seats)] = requests
            speculator.current_draft_step.fill_(0)
            speculator.draft_max_seq_len = min(int(lengths.max()) + depth, speculator.max_model_len)
            with suppress(Enough):
                self._run(starts, lengths, depth)

    def _lay_out(self, rows: Rows, taken: torch.Tensor, next_tokens: torch.Tensor, starts: np.ndarray) -> None:
        """Write the rows into the speculator's buffers.

        Args:
            taken: [rows] which of them; next_tokens: [R] the tokens behind each request's; starts: [R + 1] its first.
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
        buffers = speculator.input_buffers
        buffers.query_start_loc.fill_(num_rows)
        buffers.query_start_loc[: num_requests + 1] = torch.from_numpy(starts).to(device)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:num_requests] = places[last].int() + 1

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
        metadata = attention_of(speculator, starts, lengths, slots)
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
        speculator.on_multi_step_decode_begin(num_requests)
        try:
            decode_head(speculator, num_requests, lengths, depth)
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
        with levels(speculator, depth):
            speculator._multi_step_decode(batch, none, num_requests, False, None)


@dataclass(slots=True)
class Computed:
    """What the target computed in a step, on the device; copies, since vLLM's buffers belong to the next step."""

    # [R + 1] first row of each request
    query_start: IntArray
    # [R] tokens of each request that are computed after this step, if no draft was rejected
    lengths: np.ndarray
    # [rows] int32 tokens; int64 positions
    token_ids: torch.Tensor
    positions: torch.Tensor
    # [rows, width] as the model takes them
    hidden: torch.Tensor


class ModelledV2(DraftedByHost):
    """Mixed into vLLM's V2 runners where the configuration names a model that drafts."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = with_model(vllm_config)
        assert config.speculative_config is not None
        self.draft_model = made(config, device, self.req_states)
        if not isinstance(self.draft_model, (HEADS, *MODELS)):
            raise UnsupportedError(
                f"vLLM drafts with {type(self.draft_model).__name__} here, which cannot be asked level by level",
                "drop `--speculative-config`, or leave spec rollout off",
            )
        self.takes_layers = config.speculative_config.method == "eagle3"
        # vLLM's `ExecuteModelState` of the step that is sampled
        self._state: Any = None
        self.host.came_home = self._came_home

    # --- set-up ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _seen_by_vllm(self) -> Iterator[None]:
        self.speculator = self.draft_model
        try:
            yield
        finally:
            self.speculator = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._seen_by_vllm():
            super().load_model(*args, **kwargs)
        without_adapters(self.draft_model.model, self.model)
        if self.takes_layers:
            set_eagle3_aux_hidden_state_layers(self.model, self.draft_model.speculative_config)
            self.use_aux_hidden_state_outputs = True

    def get_draft_model(self) -> Any:
        # vLLM keeps its buffers through a sleep
        return getattr(self.draft_model, "model", None)

    def get_kv_cache_spec(self) -> Any:
        with self._seen_by_vllm():
            return super().get_kv_cache_spec()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        with self._seen_by_vllm():
            super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if is_profiling or self.shape[0] is DraftMode.OFF:
            return
        check_layers(self, self.draft_model.draft_attn_layer_names)
        self.model_drafter = join(self, ProposerV2(self.draft_model), CounterNoise(self.sampler))

    def _remove_request(self, req_id: str) -> bool:
        row = self.req_states.req_id_to_index.get(req_id)
        if row is not None:
            # drafts may reach beyond the next request's blocks, and must not find the last one's there
            for table in self.block_tables.block_tables:
                table.gpu[row].zero_()
        return super()._remove_request(req_id)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _draft_into(self, scheduler_output: SchedulerOutput) -> None:
        super()._draft_into(scheduler_output)
        if self.model_drafter is not None and self._takes_in:
            tell(self, lambda drafter: drafter.flush_if_due())

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        self._state = self.execute_model_state
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._state = None

    def _computed(self, batch: InputBatch) -> Computed | None:
        kept: list[Computed] = []
        if self.model_drafter is not None:
            tell(self, lambda drafter: kept.append(self._copied(drafter, batch)))
        return kept[0] if kept else None

    def _copied(self, drafter: ModelDrafter, batch: InputBatch) -> Computed:
        assert isinstance(drafter.proposer, ProposerV2)
        rows, state = batch.num_tokens, self._state
        if drafter.proposer.is_model:
            hidden = torch.empty(rows, 0, device=self.device)
        elif self.takes_layers:
            hidden = torch.cat([layer[:rows] for layer in state.aux_hidden_states], dim=-1)
        else:
            hidden = hidden_for_heads(self.model, state.hidden_states)[:rows].clone()
        return Computed(
            batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int32),
            batch.num_computed_tokens_np + batch.num_scheduled_tokens,
            batch.input_ids[:rows].clone(),
            batch.positions[:rows].clone(),
            hidden,
        )

    def _remember(self, output: Any, batch: InputBatch) -> None:
        super()._remember(output, batch)
        if self.model_drafter is not None and self.host.rows_in_flight > self.max_num_tokens:
            # copies of prompts would fill the device while nobody drafts
            self.settle(keep=1)

    def take_in(self, keep: int = 0) -> None:
        super().take_in(keep)
        drafter = self.model_drafter
        if drafter is None:
            return
        drafter.seats = {name: seat for name, seat in drafter.seats.items() if self.host.get(name) is seat.entry}
        if keep:
            # nobody drafts, and what waits must not grow for ever
            tell(self, lambda drafter: drafter.flush_if_due())

    def _came_home(self, step: InFlight, counts: IntArray, result: VerifyResult) -> None:
        """A step's tokens are known: so are the rows that hold.

        Args:
            counts: [R] tokens that were sampled for each request.
        """
        if self.model_drafter is not None and step.computed is not None:
            tell(self, lambda drafter: self._feed(drafter, step, counts, result))

    def _feed(self, drafter: ModelDrafter, step: InFlight, counts: IntArray, result: VerifyResult) -> None:
        computed: Computed = step.computed
        index_of = self.req_states.req_id_to_index

        def seat_of(i: int, count: int) -> Seat | None:
            request = step.requests[i]
            name = request.request_id if request is not None else ""
            if request is None or self.host.get(name) is not request or name not in index_of:
                return None
            # a prompt that is not over yet goes on with its own next token
            after = request.length - 1 if counts[i] else int(computed.lengths[i])
            return Seat(request, index_of[name], 0, int(request.buffer[min(after, drafter.most_tokens)]), after)

        def columns_of(index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows = torch.from_numpy(index).to(self.device)
            return computed.token_ids[rows], computed.positions[rows], computed.hidden[rows]

        drafter.feed_step(computed.query_start, step.trees, result, seat_of, columns_of)
