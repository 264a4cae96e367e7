"""Gives a small policy the cost of a larger model without changing the function it computes.

Three changes, each exact in floating point (a product over a wider row may add up in another order: in bf16 that can
round an output the other way, in fp32 it moves logits by about 1e-6 of their size):

1. *More blocks*, whose output projections (o_proj, down_proj) are zero: they add zeros to the residual stream.
2. *A wider MLP and more heads*, whose columns in the output projections are zero. Heads are placed so that every old
   query head still reads its old kv head.
3. *A wider residual stream*, whose new columns stay zero: the embedding has zeros there, and nothing writes to them.
   Zeros lower the mean square that RMSNorm divides by, from m to m * h / H. So with s = sqrt(h / H), norm weights are
   multiplied by s and eps by s**2. The q and k norms share the config's eps but see no new columns, so q_proj and
   k_proj are multiplied by s, which those norms cancel. H / h must be a power of 4: then s is a power of two, and
   no product rounds.

All other new weights are random and of ordinary size, so the cost is that of a real model (no denormals).
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specrollout.errors import ConfigError

from .random_model import Shape, shape_of_size

if TYPE_CHECKING:
    import torch

_SEED = 0


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where the old rows and columns stand in the new matrices, and the scale of norms; `[n]` int64 tensors."""

    # Residual stream, MLP, query heads, kv heads; [n_old * head_dim] for heads.
    hidden: "torch.Tensor"
    intermediate: "torch.Tensor"
    query: "torch.Tensor"
    kv: "torch.Tensor"
    # sqrt(h / H), a power of two.
    scale: float


def inflate(
    src: str | Path,
    dst: str | Path,
    target_params: str | Shape = "150M",
    on_layer: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes to `dst` a model with the tokens of the Qwen3 checkpoint `src` and the cost of `target_params`.

    `target_params` is a size name (see `shapes`) or a Shape. `on_layer(done, total)` is told of progress. The dtype,
    the tokenizer and the generation config are those of `src`. Equal arguments give equal weights.
    """
    import torch
    from safetensors.torch import load_file, save_file

    src, dst = Path(src), Path(dst)
    config = _read_config(src)
    old = shape_of_config(config)
    new = shape_of_size(target_params) if isinstance(target_params, str) else target_params
    _check(old, new)
    places = _places(old, new)
    weights = load_file(src / "model.safetensors")
    generator = torch.Generator().manual_seed(_SEED)
    inflated = _outer(weights, new, places, generator)
    for layer in range(new.num_layers):
        prefix = f"model.layers.{layer}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        grown = _block(block, new, places, generator, dtype=weights["model.norm.weight"].dtype)
        inflated |= {prefix + name: weight for name, weight in grown.items()}
        if on_layer is not None:
            on_layer(layer + 1, new.num_layers)
    dst.mkdir(parents=True, exist_ok=True)
    save_file(inflated, dst / "model.safetensors", metadata={"format": "pt"})
    (dst / "config.json").write_text(json.dumps(_grown_config(config, new, places), indent=2) + "\n")
    for path in src.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "training.json"):
            shutil.copyfile(path, dst / path.name)
    return dst


def shape_of_config(config: dict) -> Shape:
    """The shape that a Qwen3 `config.json` describes."""
    return Shape(
        hidden=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
    )


def _read_config(src: Path) -> dict:
    """The config of a Qwen3 checkpoint in one safetensors file, or a clear error."""
    for name in ("config.json", "model.safetensors"):
        if not (src / name).is_file():
            raise ConfigError(f"{src} has no {name}", "name a folder that `train` or `random` wrote")
    config = json.loads((src / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ConfigError(f"{src} is a {config['model_type']} model, only qwen3 can be inflated", "use arch qwen3")
    return config


def _check(old: Shape, new: Shape) -> None:
    """Refuses targets that are smaller somewhere, or whose norms would round."""
    for name in ("hidden", "num_layers", "intermediate", "num_kv_heads"):
        if getattr(new, name) < getattr(old, name):
            cause = f"{name} would shrink from {getattr(old, name)} to {getattr(new, name)}"
            raise ConfigError(cause, "choose a larger target")
    if new.num_heads // new.num_kv_heads < old.num_heads // old.num_kv_heads or new.head_dim != old.head_dim:
        cause = f"heads per kv head or head size do not fit: {old} in {new}"
        raise ConfigError(cause, "choose a target with the same head size and at least as many heads per kv head")
    ratio = new.hidden / old.hidden
    if math.log(ratio, 4) % 1:
        cause = f"hidden would grow {ratio:g} times, from {old.hidden} to {new.hidden}; only powers of 4 are exact"
        raise ConfigError(cause, f"choose a target whose hidden is {old.hidden}, {4 * old.hidden}, ...")


def _places(old: Shape, new: Shape) -> _Places:
    """Old rows come first; old query heads keep their kv head, whatever the new number of heads per kv head."""
    import torch

    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    heads = torch.arange(old.num_heads)
    heads = heads // old_group * new_group + heads % old_group
    return _Places(
        hidden=torch.arange(old.hidden),
        intermediate=torch.arange(old.intermediate),
        query=(heads[:, None] * old.head_dim + torch.arange(old.head_dim)).flatten(),
        kv=torch.arange(old.num_kv_heads * old.head_dim),
        scale=math.sqrt(old.hidden / new.hidden),
    )


def _random(rows: int, columns: int, generator: "torch.Generator", dtype: "torch.dtype") -> "torch.Tensor":
    """A matrix [rows, columns] that keeps the variance of its input."""
    import torch

    return torch.empty(rows, columns).normal_(0.0, 1.0 / math.sqrt(columns), generator=generator).to(dtype)


def _put(weight: "torch.Tensor", into: "torch.Tensor", rows: "torch.Tensor", columns: "torch.Tensor") -> None:
    """Overwrites the entries of `into` at rows x columns with `weight`."""
    into[rows[:, None], columns[None, :]] = weight


def _norm(weight: "torch.Tensor", new: Shape, places: _Places) -> "torch.Tensor":
    """A norm's weight [H]: the old entries scaled, ones elsewhere (their input is zero)."""
    grown = weight.new_ones(new.hidden)
    grown[places.hidden] = weight * places.scale
    return grown


def _outer(
    weights: dict[str, "torch.Tensor"], new: Shape, places: _Places, generator: "torch.Generator"
) -> dict[str, "torch.Tensor"]:
    """Embedding [V, H] (new columns zero), final norm [H], and the output head [V, H] unless it is tied."""
    import torch

    embedding = weights["model.embed_tokens.weight"]
    ids = torch.arange(embedding.shape[0])
    grown = {"model.embed_tokens.weight": embedding.new_zeros(embedding.shape[0], new.hidden)}
    _put(embedding, grown["model.embed_tokens.weight"], ids, places.hidden)
    grown["model.norm.weight"] = _norm(weights["model.norm.weight"], new, places)
    if "lm_head.weight" in weights:
        head = _random(len(ids), new.hidden, generator, embedding.dtype)
        _put(weights["lm_head.weight"], head, ids, places.hidden)
        grown["lm_head.weight"] = head
    return grown


def _block(
    block: dict[str, "torch.Tensor"], new: Shape, places: _Places, generator: "torch.Generator", dtype: "torch.dtype"
) -> dict[str, "torch.Tensor"]:
    """One block's weights by short name; an empty `block` gives one that adds nothing.

    Matrices that read the residual stream get random new entries (they meet zeros or lead to zeros), matrices that
    write to it get zeros.
    """
    import torch

    query, kv = new.num_heads * new.head_dim, new.num_kv_heads * new.head_dim
    sizes = {
        "self_attn.q_proj.weight": (query, new.hidden, places.query, places.hidden),
        "self_attn.k_proj.weight": (kv, new.hidden, places.kv, places.hidden),
        "self_attn.v_proj.weight": (kv, new.hidden, places.kv, places.hidden),
        "self_attn.o_proj.weight": (new.hidden, query, places.hidden, places.query),
        "mlp.gate_proj.weight": (new.intermediate, new.hidden, places.intermediate, places.hidden),
        "mlp.up_proj.weight": (new.intermediate, new.hidden, places.intermediate, places.hidden),
        "mlp.down_proj.weight": (new.hidden, new.intermediate, places.hidden, places.intermediate),
    }
    grown = {}
    for name, (rows, columns, old_rows, old_columns) in sizes.items():
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        grown[name] = torch.zeros(rows, columns, dtype=dtype) if writes else _random(rows, columns, generator, dtype)
        if block:
            scale = places.scale if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            _put(block[name] * scale, grown[name], old_rows, old_columns)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        grown[name] = _norm(block[name], new, places) if block else torch.ones(new.hidden, dtype=dtype)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        grown[name] = block[name] if block else torch.ones(new.head_dim, dtype=dtype)
    return grown


def _grown_config(config: dict, new: Shape, places: _Places) -> dict:
    """The config with the new sizes; eps follows the lowered mean square."""
    return config | {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.num_layers,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "layer_types": ["full_attention"] * new.num_layers,
        "rms_norm_eps": config["rms_norm_eps"] * places.scale**2,
    }
