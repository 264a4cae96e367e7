"""Models that draft, made from a target: a perturbed copy, and random heads in vLLM's formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AUX_LAYERS = 3
"""Layers of the target whose hidden states an EAGLE-3 head takes."""
_FILE = "model.safetensors"


def copied(target: str, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The target with every matrix changed."""
    shutil.copytree(target, folder)
    weights = load_file(folder / _FILE)
    changed = {name: change(weight) if weight.ndim > 1 else weight for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in changed.items()}, folder / _FILE, {"format": "pt"})
    return str(folder)


def perturbed(target: str, folder: Path, share: float) -> str:
    """The target with noise of so many of each matrix's standard deviations."""
    generator = torch.Generator().manual_seed(11)

    def change(weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * share
        return (weight.float() + noise).to(weight.dtype)

    return copied(target, folder, change)


def eagle_head(target: str, folder: Path) -> str:
    """A random EAGLE head over a Llama: one layer, the target's embedding and output head."""
    config = _config(target)
    weights = {"fc.weight": _random(config["hidden_size"], 2 * config["hidden_size"])}
    weights |= _layer(config, "layers.0.", config["hidden_size"])
    return _save(folder, {**config, "num_hidden_layers": 1}, weights)


def eagle3_head(target: str, folder: Path) -> str:
    """A random EAGLE-3 head over a Llama: one layer over embedding and hidden states, and its own output head."""
    config = _config(target)
    hidden = config["hidden_size"]
    weights = {
        "fc.weight": _random(hidden, AUX_LAYERS * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _random(config["vocab_size"], hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        **_layer(config, "midlayer.", 2 * hidden),
    }
    # vLLM's own choice of layers is for models of six layers and more
    layers = list(range(1, 1 + AUX_LAYERS))
    own = {"num_hidden_layers": 1, "draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": layers}
    return _save(folder, {**config, **own}, weights)


def _config(target: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(target) / "config.json").read_text())
    assert config["model_type"] == "llama", "vLLM's heads are Llamas"
    return config


def _layer(config: dict[str, Any], prefix: str, width: int) -> dict[str, torch.Tensor]:
    """A Llama's layer whose attention reads so many values per token."""
    hidden, between, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        f"{prefix}self_attn.q_proj.weight": _random(heads * size, width),
        f"{prefix}self_attn.k_proj.weight": _random(kv_heads * size, width),
        f"{prefix}self_attn.v_proj.weight": _random(kv_heads * size, width),
        f"{prefix}self_attn.o_proj.weight": _random(hidden, heads * size),
        f"{prefix}mlp.gate_proj.weight": _random(between, hidden),
        f"{prefix}mlp.up_proj.weight": _random(between, hidden),
        f"{prefix}mlp.down_proj.weight": _random(hidden, between),
        f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
    }


def _random(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 8191 + columns)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True)
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / _FILE, {"format": "pt"})
    return str(folder)
