"""Which layers trees are verified beside, on the V2 runner: stand-ins for layers, vLLM's own KV cache specs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from vllm.config.cache import CacheDType
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2.shape import layer_shape, model_shape

SIZES = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FULL = FullAttentionSpec(**SIZES)
SLIDING = SlidingWindowSpec(**SIZES, sliding_window=128)
MLA = MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1, "head_size": 576})
MAMBA = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.bfloat16,))


def backend(name: str, path: str) -> type:
    return type(name, (), {"__module__": f"vllm.v1.attention.backends.{path}", "__qualname__": name})


FLASH = backend("FlashAttentionBackend", "flash_attn")
TRITON = backend("TritonAttentionBackend", "triton_attn")
CPU = backend("CPUAttentionBackend", "cpu_attn")
FLASHINFER = backend("FlashInferBackend", "flashinfer")
# what a model makes of a backend for itself keeps its name, not its place
DERIVED = type("StaticSinkAttentionBackend", (FLASH,), {"__module__": "vllm.model_executor.layers.attention"})


def impl_of(**changes):
    """A layer that the tree kernel computes."""
    return SimpleNamespace(
        **{
            "head_size": 64,
            "kv_cache_dtype": "auto",
            "alibi_slopes": None,
            "sinks": None,
            "sliding_window": (-1, -1),
            "logits_soft_cap": 0,
            "kv_sharing_target_layer_name": None,
            "vllm_flash_attn_version": 3,
            "fused_output_quant_supported": lambda key: False,
            **changes,
        }
    )


def config_of(rswa_window=None, fuse_attn_quant=False, dtype=torch.bfloat16):
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, rswa_window=rswa_window),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=fuse_attn_quant)),
    )


def shape_of(impl=None, spec=FULL, backend=FLASH, **config):
    return layer_shape(impl or impl_of(), spec, backend, config_of(**config))


@pytest.mark.parametrize(
    ("impl", "spec", "backend"),
    [
        ({}, FULL, FLASH),
        ({"kv_cache_dtype": "bfloat16"}, FULL, FLASH),
        ({"vllm_flash_attn_version": 2, "logits_soft_cap": 30.0}, FULL, FLASH),
        ({"vllm_flash_attn_version": None, "sliding_window": -1}, FULL, CPU),
    ],
    ids=["full", "the cache's type by name", "FlashAttention 2 and softcap", "interpreted on a CPU"],
)
def test_what_the_kernel_computes_gets_trees(impl, spec, backend):
    assert shape_of(impl_of(**impl), spec, backend) == (DraftMode.TREE, "")


CHAINS = {
    "ALiBi": (dict(impl=impl_of(alibi_slopes=torch.ones(2))), "ALiBi"),
    "sinks": (dict(impl=impl_of(sinks=torch.ones(2))), "sinks"),
    "a window": (dict(impl=impl_of(sliding_window=(127, 0)), spec=SLIDING), "sliding window"),
    "a window in a full cache": (
        dict(impl=impl_of(sliding_window=(127, 0)), spec=dataclasses.replace(FULL, sliding_window=128)),
        "sliding window",
    ),
    "a window on a CPU": (dict(impl=impl_of(sliding_window=128), backend=CPU), "sliding window"),
    "a cache of another layer's": (dict(impl=impl_of(kv_sharing_target_layer_name="first")), "layers share"),
    "Triton": (dict(backend=TRITON), "TritonAttentionBackend"),
    "FlashAttention 4": (dict(impl=impl_of(vllm_flash_attn_version=4)), "FlashAttention 4"),
    "chunk lookback": (dict(impl=impl_of(chunk_lookback=0)), "chunks"),
    "chunks in a full cache": (dict(spec=dataclasses.replace(FULL, attention_chunk_size=64)), "chunks"),
    "chunks": (dict(spec=ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)), "ChunkedLocalAttentionSpec"),
    "R-SWA": (dict(spec=RSWASpec(**SIZES, rswa_window=64), rswa_window=64), "RSWASpec"),
    "R-SWA in a full cache": (dict(rswa_window=64), "R-SWA"),
    "static sinks": (dict(spec=SinkFullAttentionSpec(**SIZES, sink_len=4)), "SinkFullAttentionSpec"),
    "values of another size": (dict(spec=dataclasses.replace(FULL, head_size_v=32)), "values of 32"),
    "large heads": (
        dict(impl=impl_of(head_size=512), spec=dataclasses.replace(FULL, head_size=512, head_size_v=512)),
        "takes 256",
    ),
    "packed": (dict(spec=dataclasses.replace(FULL, state_content_bytes=300)), "packed"),
    "heads in other slots": (dict(spec=dataclasses.replace(FULL, num_head_slots=1)), "packed"),
    "MLA": (dict(impl=impl_of(head_size=576), spec=MLA), "latent attention"),
    "another backend": (dict(backend=FLASHINFER), "FlashInferBackend"),
    "a derived backend": (dict(backend=DERIVED), "StaticSinkAttentionBackend"),
    "output quantisation": (
        dict(impl=impl_of(fused_output_quant_supported=lambda key: True), fuse_attn_quant=True),
        "fuse_attn_quant",
    ),
    "another float type": (dict(impl=impl_of(kv_cache_dtype="float16"), dtype=torch.float16), "a KV cache of float16"),
}


@pytest.mark.parametrize(("case", "reason"), CHAINS.values(), ids=CHAINS)
def test_what_the_kernel_does_not_know_gets_chains_and_a_reason(case, reason):
    shape, found = shape_of(**case)
    assert shape is DraftMode.CHAIN and reason in found


def test_output_quantisation_that_the_layer_cannot_do_or_nobody_asked_for_costs_nothing():
    able = impl_of(fused_output_quant_supported=lambda key: True)
    assert shape_of(fuse_attn_quant=True)[0] is shape_of(able)[0] is DraftMode.TREE


@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode is not KVQuantMode.NONE], ids=lambda m: m.name)
def test_no_quantised_cache_gets_trees(mode):
    """fp8 neither: the query then comes quantised as well, wherever the backend can use it."""
    shape, reason = shape_of(spec=dataclasses.replace(FULL, kv_quant_mode=mode))
    assert shape is DraftMode.CHAIN and "KV cache" in reason


@pytest.mark.parametrize("name", get_args(CacheDType))
def test_of_all_cache_types_only_the_models_own_gets_trees(name):
    """The specification of a group need not tell: layers may be left out of quantisation, and types yet to come may be
    unknown to vLLM's enumeration."""
    spec = dataclasses.replace(FULL, kv_quant_mode=get_kv_quant_mode(name))
    if name != "auto":
        spec = dataclasses.replace(spec, dtype=STR_DTYPE_TO_TORCH_DTYPE[name])
    shape, _ = shape_of(impl_of(kv_cache_dtype=name), spec)
    assert shape is (DraftMode.TREE if name in ("auto", "bfloat16") else DraftMode.CHAIN)
    # a layer of another type than its group
    shape, _ = shape_of(impl_of(kv_cache_dtype=name))
    assert shape is (DraftMode.CHAIN if get_kv_quant_mode(name) else DraftMode.TREE)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (MAMBA, "recurrent"),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL}), "UniformTypeKVCacheSpecs"),
        (CircularBufferSpec(**SIZES), "compressed"),
        (dataclasses.replace(MLA, tokens_per_state=4), "compressed"),
        (dataclasses.replace(FULL, non_causal=True), "would see drafts"),
    ],
    ids=["recurrent", "unknown", "ring", "compressed", "in both directions"],
)
def test_where_a_rejected_token_leaves_a_trace_nothing_is_drafted(spec, reason):
    shape, found = layer_shape(None, spec, FLASH, config_of())
    assert shape is DraftMode.OFF and reason in found


def runner_of(specs=(FULL,), shape="tree", kernel_block_size=16, attn_type="decoder", model=None, **changes):
    layers = {
        f"layer{i}": SimpleNamespace(impl=impl_of(head_size=getattr(spec, "head_size", 0)), attn_type=attn_type)
        for i, spec in enumerate(specs)
    }
    # of a group: what its kernels take for a block
    builder = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=kernel_block_size))
    groups = [
        SimpleNamespace(backend=FLASH, kv_cache_spec=spec, layer_names=[f"layer{i}"], metadata_builders=[builder])
        for i, spec in enumerate(specs)
    ]
    plain = {"logits_processors": None, "enable_prompt_embeds": False, "is_mm_prefix_lm": False}
    return SimpleNamespace(
        **{
            "is_encoder_decoder": False,
            "model_config": SimpleNamespace(**{**plain, **(model or {})}),
            "model_state": SimpleNamespace(num_new_sampled_tokens_per_step=1),
            "batch_sharder": None,
            "kv_cache_config": SimpleNamespace(kv_cache_groups=groups),
            "spec_config": SimpleNamespace(shape=shape),
            "compilation_config": SimpleNamespace(static_forward_context=layers),
            "vllm_config": config_of(),
            "attn_groups": [[group] for group in groups],
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("runner", "shape", "reason"),
    [
        (dict(), DraftMode.TREE, ""),
        (dict(shape="chain"), DraftMode.CHAIN, "`shape`"),
        (dict(specs=(FULL, SLIDING)), DraftMode.CHAIN, "several KV cache groups"),
        (dict(specs=(MLA,)), DraftMode.CHAIN, "latent"),
        (dict(kernel_block_size=64), DraftMode.CHAIN, "smaller blocks"),
        # the strictest rule wins
        (dict(specs=(FULL, MAMBA), shape="chain"), DraftMode.OFF, "recurrent"),
        (dict(attn_type="encoder_only"), DraftMode.OFF, "both directions"),
        (dict(is_encoder_decoder=True), DraftMode.OFF, "encoder-decoder"),
        (dict(model={"enable_prompt_embeds": True}), DraftMode.OFF, "prompt embeddings"),
        (dict(model={"is_mm_prefix_lm": True}), DraftMode.CHAIN, "both directions"),
        (dict(batch_sharder="any"), DraftMode.OFF, "sharded"),
    ],
    ids=str,
)
def test_a_model_gets_what_all_of_its_layers_allow(runner, shape, reason):
    found, why = model_shape(runner_of(**runner))
    assert found is shape and reason in why


def test_one_layer_among_many_is_enough_to_keep_branches_out():
    runner = runner_of((FULL,))
    runner.compilation_config.static_forward_context["odd"] = SimpleNamespace(impl=impl_of(sinks=torch.ones(2)))
    runner.attn_groups[0][0].layer_names.append("odd")
    assert model_shape(runner) == (DraftMode.CHAIN, "attention sinks have no tree kernel")
