"""The KV cache beyond what the scheduler knows: scratch blocks for the branches of trees."""

from __future__ import annotations

import copy

import numpy as np
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_specrollout.types import DraftMode, IntArray

MOST_SCRATCH = 512
_SCRATCH_SHARE = 0.1  # of the KV cache's memory


def scratch_blocks(specs: dict[str, KVCacheSpec], cache_bytes: int, host_bytes: int) -> int:
    """How many scratch blocks to set up beside the KV cache: a share of its memory, or what the host has left if less.

    The scheduler has all blocks that stock vLLM would have: scratch that came out of them would push requests out.

    Args:
        specs: KV cache spec of each layer.
        cache_bytes: memory of the KV cache.
        host_bytes: memory that the host has left for the KV cache and for scratch together.
    """
    if len({type(spec) for spec in specs.values()}) != 1 or not specs:
        return 0  # several kinds of layers: chains only, which need none
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())
    most_bytes = min(int(cache_bytes * _SCRATCH_SHARE), max(host_bytes - cache_bytes, 0))
    return min(MOST_SCRATCH, most_bytes // block_bytes)


def with_scratch(config: KVCacheConfig, count: int) -> tuple[KVCacheConfig, IntArray]:
    """A configuration with `count` more blocks behind those the scheduler hands out, and their numbers."""
    none = np.empty(0, dtype=np.int32)
    if count == 0 or len(config.kv_cache_groups) != 1 or not config.kv_cache_tensors:
        return config, none
    larger = copy.deepcopy(config)
    larger.num_blocks += count
    size, begin = 0, 0
    # one behind another, each a region per layer: there are several where a model that drafts has other heads
    for tensor in larger.kv_cache_tensors:
        if tensor.offset != begin or tensor.layer_stride != tensor.block_stride * config.num_blocks:
            return config, none
        begin += tensor.layer_stride * len(tensor.layers)
        tensor.offset, tensor.layer_stride = size, tensor.block_stride * larger.num_blocks
        size += tensor.layer_stride * len(tensor.layers)
    for tensor in larger.kv_cache_tensors:
        tensor.size = size
    return larger, np.arange(config.num_blocks, larger.num_blocks, dtype=np.int32)


def why_off(config: KVCacheConfig) -> str:
    """Why nothing may be drafted beside such a KV cache; empty: its kind forbids nothing."""
    if not config.kv_cache_groups:
        return "the model has no KV cache"
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None)
        for one in specs.values() if specs else [spec]:
            if not isinstance(one, (FullAttentionSpec, SlidingWindowSpec)):
                return f"a rejected token cannot be taken back from a cache of kind {type(one).__name__}"
    return ""


def kv_shape(config: KVCacheConfig, attn_groups: list[list[AttentionGroup]], num_scratch: int) -> tuple[DraftMode, str]:
    """What the KV cache's make-up allows to be drafted, and why not more."""
    if reason := why_off(config):
        return DraftMode.OFF, reason
    backends = {group.backend for per_group in attn_groups for group in per_group}
    if any(not issubclass(backend, CPUAttentionBackend) for backend in backends):
        names = ", ".join(sorted(backend.get_name() for backend in backends))
        return DraftMode.OFF, f"attention backend {names} is not the one verified to be exact (CPU_ATTN)"
    if len(config.kv_cache_groups) > 1:
        return DraftMode.CHAIN, "several KV cache groups: one block table per group"
    if num_scratch == 0:
        return DraftMode.CHAIN, "no scratch blocks for branches"
    return DraftMode.TREE, ""
