"""Self-check of a device without a server: one engine over a small random model, or a given one, and what it found.

A process of its own (`python -m vllm_specrollout.server.device_check`), since a kernel that is wrong may end it.
`specrollout doctor --gpu` begins it and reads the last line that it prints.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_specrollout import __version__
from vllm_specrollout.config import envs
from vllm_specrollout.errors import SpecRolloutError, UnsupportedError

MARK = "spec-rollout-device-check "
"""Before the line that is read."""
_LOGIT_STD = 2.5
"""Standard deviation of the random model's logits: its answers are neither fixed nor uniform."""
_KV_BYTES = 256 << 20
"""Of the random model's engine: far more than its few short requests fill."""
# Qwen3's, small: two layers, four heads of queries for each of keys
_SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 8192,
}  # fmt: skip
_TINY = {**_SHAPE, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 64, "vocab_size": 512}  # fmt: skip


def write_random_model(folder: Path, sizes: dict[str, int], dtype: str) -> None:
    """A model of random weights, each product of which keeps its input's variance."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * columns**-0.5 * torch.randn(rows, columns, generator=draw)).to(getattr(torch, dtype))

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=getattr(torch, dtype))

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": matrix(vocab, hidden, _LOGIT_STD),
    }
    for number in range(sizes["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": matrix(queries, hidden), "self_attn.k_proj": matrix(keys, hidden),
            "self_attn.v_proj": matrix(keys, hidden), "self_attn.o_proj": matrix(hidden, queries),
            "self_attn.q_norm": ones(sizes["head_dim"]), "self_attn.k_norm": ones(sizes["head_dim"]),
            "mlp.gate_proj": matrix(inner, hidden), "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
            "input_layernorm": ones(hidden), "post_attention_layernorm": ones(hidden),
        }  # fmt: skip
        weights |= {f"model.layers.{number}.{name}.weight": weight for name, weight in layer.items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": dtype, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def examine(model: str | None, folder: Path) -> dict[str, Any]:
    """Start an engine that checks itself, and say what it found.

    Args:
        model: a folder or a name; None: a small random one, written below `folder`.

    Raises:
        UnsupportedError: there is no device to check.
    """
    import vllm

    from vllm_specrollout.server.engines import host_facts

    facts = host_facts()
    if not facts.is_cuda and facts.model_runner != "V2":
        raise UnsupportedError(
            f"there is no CUDA device here: vLLM runs on {facts.platform}", "run it on the host whose GPU will generate"
        )
    dtype = "bfloat16" if facts.is_cuda else "float32"
    shape = None
    if model is None:
        shape = _SHAPE if facts.is_cuda else _TINY
        write_random_model(folder, shape, dtype)
    options: dict[str, Any] = {"max_model_len": 2048}
    if not facts.is_cuda:
        # interpreted kernels are seen in few steps, and no device replays a graph
        options = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "enforce_eager": True}
    elif model is None:
        # beside whatever else is there, and whatever that does meanwhile: nothing is measured
        options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": _KV_BYTES}
    llm = vllm.LLM(
        model or str(folder),
        dtype="auto" if model else dtype,
        skip_tokenizer_init=True,
        additional_config={"spec_rollout": {"self_check": "always"}},
        **options,
    )
    stats = llm.collective_rpc("spec_rollout_stats")[0]
    llm.llm_engine.engine_core.shutdown()
    return {
        "versions": _versions(),
        "device": _device() if facts.is_cuda else facts.platform,
        "model": model or f"random, {shape}",
        "dtype": dtype if model is None else "its own",
        "shape": stats["shape"],
        "shape_reason": stats["shape_reason"],
        **stats["self_check"],
    }


def _versions() -> dict[str, str]:
    import torch
    import triton
    import vllm

    modules = {module.__name__: str(module.__version__) for module in (vllm, torch, triton)}
    cuda = torch.version.cuda or "none"
    return {"vllm-specrollout": __version__, **modules, "python": platform.python_version(), "CUDA": cuda}


def _device() -> str:
    import torch

    found = torch.cuda.get_device_properties(0)
    return f"{found.name} (sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB)"


def main() -> None:
    """Print what was found, as JSON behind `MARK`; an error as its cause and hint."""
    model = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None
    # in this process: what it does to the device is what is to be seen
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault(envs.SPEC_ROLLOUT, "1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = examine(model, Path(folder))
        except SpecRolloutError as error:
            found = {"cause": error.cause, "hint": error.hint}
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
