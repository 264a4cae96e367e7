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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specrollout.errors import ConfigError

from .random_model import Shape, shape_of_size

if TYPE_CHECKING:
    import torch

_SEED = 0


def inflate(
    src: str | Path,
    dst: str | Path,
    target_params: str | Shape = "150M",
    on_layer: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes to `dst` a model with the tokens of the Qwen3 checkpoint `src` and the cost of `target_params`.

    `target_params` is a size name or a Shape. `on_layer(done, total)` is told of progress. The dtype,
    the tokenizer and the generation config are those of `src`. Equal arguments give equal weights.
    """
    from safetensors.torch import load_file, save_file

    src, dst = Path(src), Path(dst)
    config = _read_config(src)
    old = Shape.of_config(config)
    new = shape_of_size(target_params) if isinstance(target_params, str) else target_params
    _check(old, new)
    weights = load_file(src / "model.safetensors")
    inflated = grown(weights, old, new, new.num_layers, on_layer)
    dst.mkdir(parents=True, exist_ok=True)
    save_file(inflated, dst / "model.safetensors", metadata={"format": "pt"})
    config |= new.as_config()
    config["layer_types"] = ["full_attention"] * new.num_layers
    # follows the lowered mean square
    config["rms_norm_eps"] *= old.hidden / new.hidden
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in src.glob("*"):
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "training.json"):
            shutil.copyfile(path, dst / path.name)
    return dst


def read_shape(folder: str | Path) -> Shape:
    """The shape of a Qwen3 checkpoint.

    Raises:
        ConfigError: there is none, or of another kind.
    """
    return Shape.of_config(_read_config(Path(folder)))


def grown(
    weights: dict[str, "torch.Tensor"],
    old: Shape,
    new: Shape,
    num_layers: int,
    on_layer: Callable[[int, int], None] | None = None,
) -> dict[str, "torch.Tensor"]:
    """The inflated model's weights outside of its blocks, and those of its first `num_layers` blocks.

    Args:
        weights: the small model's, by name. Blocks that it lacks add nothing, whatever it learns: who brings new
            weights to an inflated model need bring `old.num_layers` blocks.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    inflated = _outer(weights, old, new, generator)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        one = _block(block, old, new, generator, weights["model.norm.weight"].dtype)
        inflated |= {prefix + name: weight for name, weight in one.items()}
        if on_layer is not None:
            on_layer(layer + 1, num_layers)
    return inflated


def inflate_head(src: str | Path, target: str | Path, dst: str | Path) -> Path:
    """Writes to `dst` an EAGLE-3 head for an inflated policy, with the drafts of the head `src` of the policy itself.

    The inflated policy's first blocks are the policy's own, so the layers that the head takes keep their numbers. The
    head's layer is widened as a block of the policy is. `target` is the inflated policy's folder.
    """
    import torch
    from safetensors.torch import load_file, save_file

    src, target, dst = Path(src), Path(target), Path(dst)
    config = json.loads((src / "config.json").read_text())
    layer = config["transformer_layer_config"]
    inflated = _read_config(target)
    old, new = Shape.of_config(layer), Shape.of_config(inflated)
    _check(old, replace(new, num_layers=old.num_layers))
    weights = load_file(src / "model.safetensors")
    generator = torch.Generator().manual_seed(_SEED)
    grown = {name: one for name, one in weights.items() if name in ("t2d", "d2t")}
    grown["embed_tokens.weight"] = torch.nn.functional.pad(weights["embed_tokens.weight"], (0, new.hidden - old.hidden))
    # what reads the residual stream: its new columns meet zeros; what writes to it has zeros in its new rows
    grown["lm_head.weight"] = _spread(weights["lm_head.weight"], 1, old, new, generator)
    fused = _spread(weights["fc.weight"], weights["fc.weight"].shape[1] // old.hidden, old, new, generator)
    grown["fc.weight"] = torch.nn.functional.pad(fused, (0, 0, 0, new.hidden - old.hidden))
    grown["norm.weight"] = _norm(weights["norm.weight"], old, new)
    block = {name.removeprefix("layers.0."): one for name, one in weights.items() if name.startswith("layers.0.")}
    # embedding and hidden state side by side: `_block` sees the first, and is given the second's columns apart
    halves = [_half(block, half, old) for half in range(2)]
    wide = [_block(half, old, new, generator, weights["norm.weight"].dtype) for half in halves]
    for name, one in wide[0].items():
        is_input = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        grown[f"layers.0.{name}"] = torch.cat([one, wide[1][name]], dim=1) if is_input else one
    grown["layers.0.hidden_norm.weight"] = _norm(block["hidden_norm.weight"], old, new)
    dst.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous() for name, one in grown.items()}, dst / "model.safetensors", {"format": "pt"})
    layer |= new.as_config() | {"num_hidden_layers": 1}
    layer["rms_norm_eps"] *= old.hidden / new.hidden
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return dst


def _half(block: dict[str, "torch.Tensor"], half: int, old: Shape) -> dict[str, "torch.Tensor"]:
    """A head's layer as one half of its input has it."""
    columns = slice(half * old.hidden, (half + 1) * old.hidden)
    inputs = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return {name: one[:, columns] if name.endswith(inputs) else one for name, one in block.items()}


def _spread(weight: "torch.Tensor", parts: int, old: Shape, new: Shape, generator: "torch.Generator") -> "torch.Tensor":
    """[rows, parts * h] -> [rows, parts * H]: the old columns in front of each part, random ones behind them."""
    grown = _random(len(weight), parts * new.hidden, generator, weight.dtype)
    for part in range(parts):
        begin = part * new.hidden
        grown[:, begin : begin + old.hidden] = weight[:, part * old.hidden : (part + 1) * old.hidden]
    return grown


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


def _random(rows: int, columns: int, generator: "torch.Generator", dtype: "torch.dtype") -> "torch.Tensor":
    """A matrix [rows, columns] that keeps the variance of its input."""
    import torch

    return torch.empty(rows, columns).normal_(0.0, 1.0 / math.sqrt(columns), generator=generator).to(dtype)


def _norm(weight: "torch.Tensor", old: Shape, new: Shape) -> "torch.Tensor":
    """A norm's weight [H]: the old entries scaled, ones elsewhere (their input is zero)."""
    grown = weight.new_ones(new.hidden)
    grown[: old.hidden] = weight * math.sqrt(old.hidden / new.hidden)
    return grown


def _outer(
    weights: dict[str, "torch.Tensor"], old: Shape, new: Shape, generator: "torch.Generator"
) -> dict[str, "torch.Tensor"]:
    """Embedding [V, H] (new columns zero), final norm [H], and the output head [V, H] unless it is tied."""
    import torch

    embedding = weights["model.embed_tokens.weight"]
    grown = {
        "model.embed_tokens.weight": torch.nn.functional.pad(embedding, (0, new.hidden - old.hidden)),
        "model.norm.weight": _norm(weights["model.norm.weight"], old, new),
    }
    if "lm_head.weight" in weights:
        grown["lm_head.weight"] = _spread(weights["lm_head.weight"], 1, old, new, generator)
    return grown


def _block(
    block: dict[str, "torch.Tensor"], old: Shape, new: Shape, generator: "torch.Generator", dtype: "torch.dtype"
) -> dict[str, "torch.Tensor"]:
    """One block's weights by short name; an empty `block` gives one that adds nothing.

    Matrices that read the residual stream get random new entries (they meet zeros or lead to zeros), matrices that
    write to it get zeros.
    """
    import torch

    # old rows come first, but old query heads keep their kv head, whatever the new number of heads per kv head
    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    heads = torch.arange(old.num_heads)
    heads = heads // old_group * new_group + heads % old_group
    query = (new.num_heads * new.head_dim, (heads[:, None] * old.head_dim + torch.arange(old.head_dim)).flatten())
    kv = (new.num_kv_heads * new.head_dim, slice(old.num_kv_heads * old.head_dim))
    hidden, intermediate = (new.hidden, slice(old.hidden)), (new.intermediate, slice(old.intermediate))
    # name -> (size, where the old ones stand) of rows and of columns
    matrices = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    grown = {}
    for name, ((rows, old_rows), (columns, old_columns)) in matrices.items():
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        grown[name] = torch.zeros(rows, columns, dtype=dtype) if writes else _random(rows, columns, generator, dtype)
        if block:
            is_normed = name.endswith(("q_proj.weight", "k_proj.weight"))
            scale = math.sqrt(old.hidden / new.hidden) if is_normed else 1.0
            grown[name][old_rows, old_columns] = block[name] * scale
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        grown[name] = _norm(block[name], old, new) if block else torch.ones(new.hidden, dtype=dtype)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        grown[name] = block[name] if block else torch.ones(new.head_dim, dtype=dtype)
    return grown
