"""A model that drafts on the V1 runner: the drafter made, and fed with what each step computed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import build_logitsprocs

from vllm_specrollout.types import DraftMode, VerifyResult
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.model_drafter import ModelDrafter
from vllm_specrollout.worker.proposing import Seat, check_layers
from vllm_specrollout.worker.ranks import Ranks
from vllm_specrollout.worker.v1.proposer import HeadsProposer, ProposerV1
from vllm_specrollout.worker.waiting_rows import Rows, have_prompts, of_those_there, rows_that_hold


def plain_processors(runner: Any) -> Any:
    """The logits processors of plain decoding: vLLM leaves min_p and others out where a model drafts."""
    plain = copy.copy(runner.vllm_config)
    plain.speculative_config = None
    custom = runner.model_config.logits_processors
    return build_logitsprocs(plain, runner.device, PIN_MEMORY, runner.is_pooling_model, tuple(custom or ()))


def model_drafter_of(runner: Any) -> ModelDrafter:
    """The drafter around the proposer that vLLM has loaded for this runner; it drafts from now on."""
    config = config_of(runner.vllm_config)
    own, scratch = runner.drafter, getattr(runner, "scratch", None)
    check_layers(runner, getattr(own, "_draft_attn_layer_names", ()))
    # Medusa's proposer, where a version has one, is the only one that runs heads and no layers
    is_heads = type(own).__name__ == "MedusaProposer"
    proposer = HeadsProposer(own) if is_heads else ProposerV1(own, own.block_size, scratch)
    drafter = ModelDrafter(proposer, runner.noise, len(config.drafters), Ranks(runner, runner.drafting))
    runner.spec_rollout.replace_drafters([*runner.spec_rollout.drafters, drafter])
    return drafter


def feed(drafter: ModelDrafter, runner: Any, state: Any, output: Any) -> None:
    """The runner has sampled a step.

    Args:
        drafter: of the runner.
        runner: the V1 model runner; its batch is that of the step.
        state: vLLM's `ExecuteModelState` of the step, with the target's hidden states.
        output: vLLM's `ModelRunnerOutput`.
    """
    proposer, batch, ids = drafter.proposer, runner.input_batch, output.req_ids
    assert isinstance(proposer, (ProposerV1, HeadsProposer))
    query_start = runner.query_start_loc.np[: len(ids) + 1]
    trees, sampled = runner.step.trees, runner.step.sampled
    result = None if sampled is None else VerifyResult(sampled.num_accepted, sampled.accepted)
    index, counts = rows_that_hold(query_start, trees, result)
    # heads that keep nothing have no blocks
    table = batch.block_table[proposer.of_vllm.kv_cache_gid if isinstance(proposer, ProposerV1) else 0]
    blocks = table.num_blocks_per_row
    if isinstance(proposer, ProposerV1):
        proposer.block_table = table.get_numpy_array()
    drafter.seats = {}
    names: list[str | None] = []
    for i, (name, tokens) in enumerate(zip(ids, output.sampled_token_ids, strict=True)):
        # a prompt that is not over yet goes on with its own next token
        at = int(batch.num_computed_tokens_cpu[i]) + int(counts[i])
        token = tokens[-1] if tokens else int(batch.token_ids_cpu[i, at])
        entry = runner.book.get(runner.requests[name])
        drafter.seats[name] = Seat(entry, i, int(blocks[i]), token)
        # who never drafts is fed for the sake of those who share its prompt's blocks
        names.append(None if entry.admission.shape is DraftMode.OFF and counts[i] == 1 else name)
    prompts = [name for name, has in zip(names, have_prompts(query_start, trees), strict=True) if has and name]
    names, counts, index = of_those_there(names, counts, index)
    rows = torch.from_numpy(index)
    hidden = _hidden_of(proposer, state, rows)
    own = Rows(names, np.asarray(counts), runner.input_ids.gpu[rows], runner.positions[rows], hidden)
    drafter.feed(own, prompts)


def _hidden_of(proposer: ProposerV1 | HeadsProposer, state: Any, rows: torch.Tensor) -> torch.Tensor:
    """[rows, width] the target's hidden states, as far as the proposer takes them."""
    if proposer.takes_layers:
        return torch.cat([layer[rows] for layer in state.aux_hidden_states], dim=-1)
    return state.hidden_states[rows] if proposer.takes_hidden else torch.empty(len(rows), 0)
