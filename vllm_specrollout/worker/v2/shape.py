"""What the V2 runner can draft: for a model, and for a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from vllm_specrollout.types import Shape
from vllm_specrollout.worker.v2.attention import is_supported_backend

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2


def model_shape(runner: SpecRolloutV2) -> tuple[Shape, str]:
    """What may be drafted for the loaded model, and why not more."""
    if runner.is_encoder_decoder or runner.supports_mm_inputs or runner.uses_inputs_embeds:
        return Shape.OFF, "encoder-decoder or multimodal model, or prompt embeddings"
    if runner.model_config.logits_processors:
        return Shape.OFF, "custom logits processors may keep state that a draft would disturb"
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        return Shape.OFF, "the model does not decode token by token"
    if runner.batch_sharder is not None:
        return Shape.OFF, "batch-sharded sampling splits a request's rows from each other"
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    if any(isinstance(spec, MambaSpec) or not isinstance(spec, AttentionSpec) for spec in specs):
        return Shape.OFF, "recurrent layers: a rejected token cannot be taken back"
    if runner.spec_config.shape == "chain":
        return Shape.CHAIN, '`shape` is "chain"'
    if len(specs) != 1 or not specs:
        return Shape.CHAIN, "several KV cache groups"
    if isinstance(specs[0], MLAAttentionSpec):
        return Shape.CHAIN, "multi-head latent attention has no tree kernel"
    if not isinstance(specs[0], FullAttentionSpec | SlidingWindowSpec):
        return Shape.CHAIN, f"no tree kernel for {type(specs[0]).__name__}"
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    unsupported = sorted(name for name in backends if not is_supported_backend(name))
    if unsupported:
        return Shape.CHAIN, f"no tree kernel beside the attention backend {', '.join(unsupported)}"
    return Shape.TREE, ""


def one_line_reason(params: SamplingParams) -> str:
    """Why a request is drafted for in chains only; empty if trees will do.

    These processors find a row's history in the rows before it, which is the row's path only in a chain.
    """
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return "penalties count the rows before a row"
    if params.bad_words:
        return "bad_words look at the rows before a row"
    return ""
