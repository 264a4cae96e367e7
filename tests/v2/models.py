"""Random models small enough for interpreted kernels."""

from __future__ import annotations

from pathlib import Path


def small_model(folder: Path, arch: str, dtype: str) -> str:
    """Two layers of a random model, made once per folder."""
    from vllm_specrollout.bench.policy.random_model import make_random_model

    path = folder / f"{arch}-{dtype}"
    if not path.exists():
        make_random_model(path, arch=arch, size="1M", num_layers=2, dtype=dtype, seed=7)
    return str(path)


def small_experts(folder: Path) -> str:
    """Two layers of a random mixture of experts, whose router's choices depend on the token, made once per folder."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from vllm_specrollout.bench.policy.tokenizer import build_tokenizer

    path = folder / "qwen3-moe"
    if path.exists():
        return str(path)
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
