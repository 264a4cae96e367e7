"""What the V2 runner can draft: for a model, and for a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.utils import AttentionGroup

from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2.layers import layer_shape, spec_shape, specs_of

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2

_STRICTEST_FIRST = (DraftMode.OFF, DraftMode.CHAIN, DraftMode.TREE)


def model_shape(runner: SpecRolloutV2) -> tuple[DraftMode, str]:
    """What may be drafted for the loaded model, and why not more."""
    if runner.is_encoder_decoder or runner.supports_mm_inputs or runner.uses_inputs_embeds:
        return DraftMode.OFF, "encoder-decoder or multimodal model, or prompt embeddings"
    if runner.model_config.logits_processors:
        return DraftMode.OFF, "custom logits processors may keep state that a draft would disturb"
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        return DraftMode.OFF, "the model does not decode token by token"
    if runner.batch_sharder is not None:
        return DraftMode.OFF, "batch-sharded sampling splits a request's rows from each other"
    layers = runner.compilation_config.static_forward_context.values()
    if any(getattr(layer, "attn_type", AttentionType.DECODER) != AttentionType.DECODER for layer in layers):
        return DraftMode.OFF, "layers that attend in both directions: rows would see drafts"
    groups = runner.kv_cache_config.kv_cache_groups
    found = [spec_shape(spec) for group in groups for spec in specs_of(group.kv_cache_spec)]
    if runner.spec_config.shape == "chain":
        found.append((DraftMode.CHAIN, '`shape` is "chain"'))
    if len(groups) != 1:
        found.append((DraftMode.CHAIN, "several KV cache groups"))
    for group in itertools.chain.from_iterable(runner.attn_groups):
        found += _group_shapes(runner, group)
    # the first of the strictest
    return min(found, key=lambda shape_and_reason: _STRICTEST_FIRST.index(shape_and_reason[0]))


def _group_shapes(runner: SpecRolloutV2, group: AttentionGroup) -> Iterator[tuple[DraftMode, str]]:
    """What may be drafted beside each layer of those that share an attention backend."""
    sizes = {builder.kv_cache_spec.block_size for builder in group.metadata_builders}
    if sizes - {group.kv_cache_spec.block_size}:
        yield DraftMode.CHAIN, f"{group.backend.__qualname__} reads smaller blocks than the KV cache has"
    layers = runner.compilation_config.static_forward_context
    for name in group.layer_names:
        impl = getattr(layers[name], "impl", None)
        yield layer_shape(impl, group.kv_cache_spec, group.backend, runner.vllm_config)


def one_line_reason(params: SamplingParams) -> str:
    """Why a request is drafted for in chains only; empty if trees will do.

    These processors find a row's history in the rows before it, which is the row's path only in a chain.
    """
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties count the rows before a row"
    if params.bad_words:
        return "bad_words look at the rows before a row"
    return ""
