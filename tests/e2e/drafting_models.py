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


def peagle_head(target: str, folder: Path) -> str:
    """A random EAGLE-3 head that gives all positions in one pass: later ones stand for a masked token."""
    path = Path(eagle3_head(target, folder))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "ptd_token_id": 0}))
    weights = load_file(path / _FILE)
    weights["mask_hidden"] = _random(1, AUX_LAYERS * config["hidden_size"]).to(weights["fc.weight"].dtype)
    save_file(weights, path / _FILE, {"format": "pt"})
    return str(path)


def dflash_head(target: str, folder: Path) -> str:
    """A random DFlash drafter: a layer whose queries stand for masked tokens, over keys and values of hidden states."""
    config = _config(target)
    hidden, size, layers = config["hidden_size"], config["head_dim"], list(range(AUX_LAYERS))
    weights = _layer(config, "layers.0.", hidden)
    weights |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(size) for name in ("q", "k")}
    weights |= {name: torch.ones(hidden) for name in ("layers.0.input_layernorm.weight", "hidden_norm.weight")}
    weights |= {"norm.weight": torch.ones(hidden), "fc.weight": _random(hidden, AUX_LAYERS * hidden)}
    own = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "layer_types": None}
    dflash = {"dflash_config": {"mask_token_id": 0, "target_layer_ids": layers}}
    return _save(folder, {**config, **own, **dflash}, weights)


def medusa_heads(target: str, folder: Path, num_heads: int) -> str:
    """Medusa's heads over a target, whose residual blocks say nothing: each head is the target's own output head."""
    config = _config(target)
    hidden, head = config["hidden_size"], load_file(Path(target) / _FILE)["lm_head.weight"].float()
    weights: dict[str, torch.Tensor] = {}
    for i in range(num_heads):
        weights[f"blocks.{i}.layers.0.weight"] = torch.zeros(hidden, hidden)
        weights[f"lm_heads.{i}.weight"] = head.clone()
    own = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": num_heads, "num_hidden_layers": 1}
    kept = {name: config[name] for name in ("hidden_size", "vocab_size")}
    return _save(folder, {**kept, **own, "dtype": config.get("dtype") or config.get("torch_dtype")}, weights)


def with_own_layers(target: str, folder: Path) -> str:
    """A Llama with a layer of its own that predicts one token further (MTP), in the form of a MiMo: Qwen2's, which has
    biases that a Llama lacks."""
    config = _config(target)
    shutil.copytree(target, folder)
    own = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    weights, hidden, prefix = load_file(folder / _FILE), config["hidden_size"], "model.mtp_layers.0."
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(weights[name]), dtype=weights[name].dtype)
    layer = {
        name.replace("model.layers.0.", prefix): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.")
    }
    layer |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("token_layernorm", "hidden_layernorm")}
    layer |= {f"{prefix}final_layernorm.weight": torch.ones(hidden)}
    layer |= {f"{prefix}input_proj.weight": _random(hidden, 2 * hidden)}
    dtype = weights["model.norm.weight"].dtype
    save_file(weights | {name: one.to(dtype) for name, one in layer.items()}, folder / _FILE, {"format": "pt"})
    return str(folder)


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


def drafting_with(kind: str, target: str, folder: Path) -> dict[str, Any]:
    """vLLM's `speculative_config` with a model of that kind."""
    method, path = {
        "draft_model": lambda: ("draft_model", perturbed(target, folder, 0.3)),
        "eagle": lambda: ("eagle", eagle_head(target, folder)),
        "eagle3": lambda: ("eagle3", eagle3_head(target, folder)),
        "peagle": lambda: ("eagle3", peagle_head(target, folder)),
        "dflash": lambda: ("dflash", dflash_head(target, folder)),
        "medusa": lambda: ("medusa", medusa_heads(target, folder, 5)),
        "nan": lambda: ("draft_model", copied(target, folder, lambda weight: weight * torch.nan)),
        "huge": lambda: ("draft_model", copied(target, folder, lambda weight: weight * 1e18)),
        "constant": lambda: ("draft_model", copied(target, folder, torch.ones_like)),
    }[kind]()
    more = {"parallel_drafting": True} if kind == "peagle" else {}
    return {"method": method, "model": path, "num_speculative_tokens": 5, **more}
