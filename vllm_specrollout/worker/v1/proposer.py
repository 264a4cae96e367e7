"""vLLM's proposer of the V1 runner, run on rows of the target that we choose.

What belongs here: rows laid out as one batch of the proposer's, and as many passes as its buffers need. vLLM loads its
model, keeps its KV cache in the engine's blocks, and runs it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.logits_processor import build_logitsprocs

from vllm_specrollout.types import IntArray, VerifyResult
from vllm_specrollout.worker.models.drafter import ModelDrafter, join
from vllm_specrollout.worker.models.proposing import (
    Enough,
    HeldRows,
    Proposer,
    Seat,
    check_layers,
    have_prompts,
    rows_that_hold,
    without_adapters,
)


class ProposerV1(Proposer):
    """Runs the proposers of vLLM's V1 runner.

    Args:
        proposer: vLLM's, its model loaded.
        block_size: tokens per block of its KV cache.
        scratch: blocks that the scheduler does not know, for tokens that are only drafted; None: there are none.
    """

    def __init__(self, proposer: Any, block_size: int, scratch: IntArray | None) -> None:
        extra = max(1, proposer.net_num_new_slots_per_request)
        super().__init__(
            proposer, max_depth=proposer.num_speculative_tokens, max_rows=proposer.max_num_tokens, extra=extra
        )
        proposer._sample_draft_tokens = self._sample
        self.is_one_pass = proposer.parallel_drafting
        self.takes_hidden: bool = proposer.pass_hidden_states_to_model
        self.takes_layers: bool = proposer.method in ("eagle3", "dflash") and proposer.eagle3_use_aux_hidden_state
        """Whether it takes several layers' hidden states, side by side, and not the last one's."""
        self._block_size = block_size
        # the first one holds zeros for the target's branches
        self._scratch: IntArray = np.zeros(0, dtype=np.int32) if scratch is None else scratch[1:]
        # [requests, width] the runner's, of the step in progress
        self.block_table: IntArray = np.zeros((0, 0), dtype=np.int32)

    def _sample(self, hidden: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """In the place of `SpecDecodeBaseProposer._sample_draft_tokens`."""
        logits = self.of_vllm.model.compute_logits(hidden)
        if self.is_one_pass:
            return self.draw_all(logits.view(-1, self.max_depth, logits.shape[-1])).view(-1), None
        return self.draw(logits), None

    def _pass(
        self, seats: Sequence[Seat], rows: HeldRows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
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


class HeadsProposer(Proposer):
    """Runs Medusa's heads: each of them looks so many tokens ahead from the target's last hidden state alone."""

    takes_hidden, takes_layers = True, False

    def __init__(self, proposer: Any) -> None:
        super().__init__(proposer, max_depth=proposer.num_speculative_tokens, max_rows=proposer.max_num_tokens, extra=1)
        self.is_one_pass = True

    def _pass(
        self, seats: Sequence[Seat], rows: HeldRows, index: Sequence[np.ndarray], next_tokens: np.ndarray, depth: int
    ) -> None:
        if depth == 0:
            return  # it keeps nothing of what it has seen
        last = torch.from_numpy(np.asarray([own[-1] for own in index]))
        model = self.of_vllm.model
        with torch.inference_mode():
            self.draw_all(torch.stack(model.compute_logits(model(rows.hidden[last])), dim=1)[:, : self.max_depth])


def plain_processors(runner: Any) -> Any:
    """The logits processors of plain decoding: vLLM leaves min_p and others out where a model drafts."""
    plain = copy.copy(runner.vllm_config)
    plain.speculative_config = None
    custom = runner.model_config.logits_processors
    return build_logitsprocs(plain, runner.device, PIN_MEMORY, runner.is_pooling_model, tuple(custom or ()))


def model_drafter_of(runner: Any) -> ModelDrafter:
    """The drafter around the proposer that vLLM has loaded for this runner; it drafts from now on."""
    own, scratch = runner.drafter, getattr(runner, "scratch", None)
    check_layers(runner, getattr(own, "_draft_attn_layer_names", ()))
    without_adapters(own.model, runner.get_model())
    # Medusa's proposer, where a version has one, is the only one that runs heads and no layers
    is_heads = type(own).__name__ == "MedusaProposer"
    return join(runner, HeadsProposer(own) if is_heads else ProposerV1(own, own.block_size, scratch), runner.noise)


def feed(drafter: ModelDrafter, runner: Any, state: Any, output: Any) -> None:
    """The runner has sampled a step.

    Args:
        drafter: of the runner.
        runner: the V1 model runner; its batch is that of the step.
        state: vLLM's `ExecuteModelState` of the step, with the target's hidden states.
        output: vLLM's `ModelRunnerOutput`.
    """
    proposer, batch, step = drafter.proposer, runner.input_batch, runner.step
    assert isinstance(proposer, (ProposerV1, HeadsProposer))
    # heads that keep nothing have no blocks
    table = batch.block_table[proposer.of_vllm.kv_cache_gid if isinstance(proposer, ProposerV1) else 0]
    blocks = table.num_blocks_per_row
    if isinstance(proposer, ProposerV1):
        proposer.block_table = table.get_numpy_array()

    def columns_of(index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(index)
        return runner.input_ids.gpu[rows], runner.positions[rows], _hidden_of(proposer, state, rows)

    query_start = runner.query_start_loc.np[: len(output.req_ids) + 1]
    result = None if step.sampled is None else VerifyResult(step.sampled.num_accepted, step.sampled.accepted)
    index, counts = rows_that_hold(query_start, step.trees, result)
    rows = np.arange(len(counts))
    # sampled in this step; a prompt that is not over yet goes on with its own next token
    after = batch.num_computed_tokens_cpu[rows] + counts
    tokens = batch.token_ids_cpu[rows, np.minimum(after, drafter.most_tokens)]
    columns = (column.tolist() for column in (rows, blocks[rows], tokens, after))
    seats = list(map(Seat, step.entries, *columns))
    drafter.feed_step(seats, counts, have_prompts(query_start, step.trees).tolist(), index, columns_of)


def _hidden_of(proposer: ProposerV1 | HeadsProposer, state: Any, rows: torch.Tensor) -> torch.Tensor:
    """[rows, width] the target's hidden states, as far as the proposer takes them."""
    if proposer.takes_layers:
        return torch.cat([layer[rows] for layer in state.aux_hidden_states], dim=-1)
    return state.hidden_states[rows] if proposer.takes_hidden else torch.empty(len(rows), 0)
