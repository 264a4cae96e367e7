"""Shapes that the V2 runner can draft: for a model, and for a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import AttentionGroup

from vllm_specrollout.kernels.tree_attention.kernel import MAX_HEAD_SIZE
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.common import IMAGES_BOTH_WAYS

_BACKENDS = frozenset(
    backend.get_path() for backend in (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CPU_ATTN)
)
# of FlashAttention: those that are called over a context as vLLM's context parallelism calls them
_FLASH_VERSIONS = (2, 3)
# what vLLM's compiler can make an attention layer write instead of its result
_OUTPUT_QUANT_KEYS = (kFp8StaticTensorSym, kNvfp4Dynamic)


def specs_of(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """The caches of one group, a model's that drafts among them: alike but for their sizes."""
    return tuple(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def spec_shape(spec: KVCacheSpec) -> tuple[DraftMode, str]:
    """What one KV cache allows at most, whatever reads it."""
    if isinstance(spec, MambaSpec):
        return DraftMode.OFF, "recurrent layers: a rejected token cannot be taken back"
    if not isinstance(spec, AttentionSpec):
        return DraftMode.OFF, f"nothing is known of {type(spec).__name__}"
    if isinstance(spec, CircularBufferSpec) or spec.tokens_per_state != 1:
        return DraftMode.OFF, "compressed KV caches: a rejected token cannot be taken back"
    if getattr(spec, "non_causal", False):
        return DraftMode.OFF, "rows attend to what follows them: they would see drafts"
    return DraftMode.TREE, ""


def layer_shape(impl: Any, spec: KVCacheSpec, backend: type, config: VllmConfig) -> tuple[DraftMode, str]:
    """What may be drafted beside one attention layer, and why not more.

    Args:
        impl: vLLM's implementation of the layer; None if it has none.
        spec: its KV cache.
        backend: its attention backend's class.
        config: the engine's.
    """
    shape, reason = spec_shape(spec)
    if shape is DraftMode.OFF:
        return shape, reason
    reason = next(_of_cache(impl, spec, backend, config), "") or next(_of_attention(impl, spec, config), "")
    return (DraftMode.CHAIN, reason) if reason else (DraftMode.TREE, "")


def _of_cache(impl: Any, spec: Any, backend: type, config: VllmConfig) -> Iterator[str]:
    """Why the layer's KV cache is not attended to as a context."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        yield "multi-head latent attention has no tree kernel"
    # by its place, not its name: a backend derived from a known one goes by the same name
    path = f"{backend.__module__}.{backend.__qualname__}"
    if impl is None or path not in _BACKENDS:
        yield f"no trees beside the attention backend {backend.__qualname__}: contexts are FlashAttention's"
        return
    version = getattr(impl, "vllm_flash_attn_version", None)
    if path != AttentionBackendEnum.CPU_ATTN.get_path() and version not in _FLASH_VERSIONS:
        yield f"no trees beside FlashAttention {version}: contexts are attended to by {_FLASH_VERSIONS}"
    if _has_window(impl.sliding_window):
        yield "a sliding window: it goes by the rows' places, and nodes stand at their depths"
    if impl.kv_sharing_target_layer_name is not None:
        yield "a KV cache that layers share: a layer without keys of its own has no nodes'"
    if type(spec) is not FullAttentionSpec:
        yield f"no tree kernel for {type(spec).__name__}"
    dtype = config.model_config.dtype
    modes = {spec.kv_quant_mode, get_kv_quant_mode(impl.kv_cache_dtype)}
    if modes != {KVQuantMode.NONE} or spec.dtype != dtype:
        yield f"a KV cache of {impl.kv_cache_dtype}: trees need one of the model's own type"
    if not spec.head_size == spec.head_size_v == impl.head_size:
        yield f"keys of {spec.head_size} elements and values of {spec.head_size_v}"
    if spec.head_size > MAX_HEAD_SIZE:
        yield f"heads of {spec.head_size} elements, where the tree kernel takes {MAX_HEAD_SIZE}"
    if spec.state_content_bytes is not None or spec.num_heads != spec.num_kv_heads:
        yield "a packed KV cache has no tree kernel"


def _has_window(sliding_window: Any) -> bool:
    """vLLM says (left, right) with (-1, -1) for none, or one number, or None."""
    left = sliding_window[0] if isinstance(sliding_window, tuple) else sliding_window
    return left is not None and left >= 0


def _of_attention(impl: Any, spec: Any, config: VllmConfig) -> Iterator[str]:
    """Why the kernel would compute something else than the layer."""
    if impl.alibi_slopes is not None:
        yield "ALiBi has no tree kernel"
    if impl.sinks is not None:
        yield "attention sinks have no tree kernel"
    if getattr(impl, "chunk_lookback", -1) > -1 or getattr(spec, "attention_chunk_size", None) is not None:
        yield "attention in chunks has no tree kernel"
    if config.model_config.rswa_window is not None:
        yield "R-SWA, a window that spares the prompt, has no tree kernel"
    if config.compilation_config.pass_config.fuse_attn_quant and any(
        impl.fused_output_quant_supported(key) for key in _OUTPUT_QUANT_KEYS
    ):
        yield "the compiler quantises what attention writes (`fuse_attn_quant`)"


_STRICTEST_FIRST = (DraftMode.OFF, DraftMode.CHAIN, DraftMode.TREE)


def model_shape(runner: Any) -> tuple[DraftMode, str]:
    """What may be drafted for the loaded model, and why not more."""
    if runner.is_encoder_decoder or runner.model_config.enable_prompt_embeds:
        return DraftMode.OFF, "encoder-decoder model, or prompt embeddings"
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
    if runner.model_config.is_mm_prefix_lm:
        found.append((DraftMode.CHAIN, IMAGES_BOTH_WAYS))
    if len(groups) != 1:
        found.append((DraftMode.CHAIN, "several KV cache groups"))
    for group in itertools.chain.from_iterable(runner.attn_groups):
        found += _group_shapes(runner, group)
    # the first of the strictest
    return min(found, key=lambda shape_and_reason: _STRICTEST_FIRST.index(shape_and_reason[0]))


def _group_shapes(runner: Any, group: AttentionGroup) -> Iterator[tuple[DraftMode, str]]:
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
