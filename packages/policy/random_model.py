"""Models with random weights and a chosen size, for pure speed runs and for tests of many architectures.

Scales: embeddings have variance 1 and every projection keeps the variance of its input, so no layer drowns the
others; the output head gives logits a standard deviation of `LOGIT_STD`, so that sampling at temperature 1 is neither
fixed nor uniform (with 407 tokens the entropy is about 3.4 nats).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specrollout.config.checks import check_choice, check_range
from vllm_specrollout.errors import ConfigError

from .tokenizer import END, MAX_LEN, PAD, SPECIALS, build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ARCHS = ("qwen3", "llama", "mistral")
LOGIT_STD = 2.5
"""Standard deviation of a row of logits."""
DEFAULT_WINDOW = 64
"""Sliding window of `mistral` in tokens; short, so that tests cross it soon."""
HEAD_DIM = 64
"""Head size of every model here; one that vLLM's CPU attention supports."""


_CONFIG_NAMES = {
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "intermediate": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder with gated MLPs and grouped-query attention; biases nowhere."""

    hidden: int
    num_layers: int
    # Width of the gated MLP.
    intermediate: int
    num_heads: int
    # Divides num_heads; head i reads kv head i // (num_heads // num_kv_heads).
    num_kv_heads: int
    head_dim: int = HEAD_DIM

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> "Shape":
        """The shape that a model's `config.json` describes."""
        return cls(**{name: config[theirs] for name, theirs in _CONFIG_NAMES.items()})

    def as_config(self) -> dict[str, int]:
        """Its part of a model's `config.json`."""
        return {theirs: getattr(self, name) for name, theirs in _CONFIG_NAMES.items()}

    def num_params(self) -> int:
        """Weights of all blocks; embeddings, output head and norms are not counted."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)


# Hidden is a power of 4 times 64 from 3M up, so that inflating one into another scales norms by a power of two.
SHAPES = {
    "1M": Shape(hidden=128, num_layers=5, intermediate=384, num_heads=2, num_kv_heads=1),
    "3M": Shape(hidden=256, num_layers=4, intermediate=704, num_heads=4, num_kv_heads=2),
    "30M": Shape(hidden=1024, num_layers=5, intermediate=1536, num_heads=8, num_kv_heads=4),
    "150M": Shape(hidden=1024, num_layers=12, intermediate=3072, num_heads=16, num_kv_heads=8),
    "400M": Shape(hidden=1024, num_layers=32, intermediate=3072, num_heads=16, num_kv_heads=8),
    # for GPUs: Qwen3 8B's widths, with twice as many heads of half their size
    "7B": Shape(hidden=4096, num_layers=36, intermediate=12288, num_heads=64, num_kv_heads=16),
}


def shape_of_size(size: str, *, hidden: int | None = None, num_layers: int | None = None) -> Shape:
    """The shape named `size`, with its hidden width or number of layers replaced if given."""
    check_choice("size", size, tuple(SHAPES))
    given = {name: value for name, value in (("hidden", hidden), ("num_layers", num_layers)) if value is not None}
    for name, value in given.items():
        check_range(name, value, 1, 1 << 20)
    return replace(SHAPES[size], **given)


def make_random_model(
    out_dir: str | Path,
    arch: str = "qwen3",
    size: str = "3M",
    seed: int = 0,
    dtype: str = "bfloat16",
    vocab_size: int | None = None,
    sliding_window: int | None = None,
    num_layers: int | None = None,
    hidden: int | None = None,
    on_weight: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a random model and the policy's tokenizer into `out_dir`, and returns its path.

    Equal arguments give equal weights. `vocab_size` defaults to the tokenizer's, and may only be larger: ids beyond
    the tokenizer's decode to nothing. `sliding_window` (tokens) is for `mistral` alone. `on_weight(done, total)` is
    told of progress.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_choice("arch", arch, ARCHS)
    check_choice("dtype", dtype, ("bfloat16", "float32"))
    if sliding_window is not None and arch != "mistral":
        raise ConfigError(f"{arch} has no sliding window, but {sliding_window} was given", "use arch mistral")
    tokenizer = build_tokenizer()
    vocab_size = len(tokenizer) if vocab_size is None else vocab_size
    check_range("vocab_size", vocab_size, len(tokenizer), 1 << 30)
    shape = shape_of_size(size, hidden=hidden, num_layers=num_layers)
    config = model_config(arch, shape, vocab_size, sliding_window=sliding_window)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.to_empty(device="cpu")
    _fill(model, seed, on_weight)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def model_config(
    arch: str, shape: Shape, vocab_size: int, *, sliding_window: int | None = None, tied: bool = False
) -> "PretrainedConfig":
    """A transformers config of architecture `arch` with these sizes and the tokenizer's special ids."""
    from transformers import LlamaConfig, MistralConfig, Qwen3Config

    common = {
        "vocab_size": vocab_size,
        **shape.as_config(),
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": SPECIALS.index(END),
        "pad_token_id": SPECIALS.index(PAD),
    }
    if arch == "mistral":
        return MistralConfig(**common, sliding_window=sliding_window or DEFAULT_WINDOW)
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[arch](**common)


def _fill(model: "torch.nn.Module", seed: int, on_weight: Callable[[int, int], None] | None) -> None:
    """Overwrites all weights in place, in the order of their names, from one generator."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = sorted(model.named_parameters())
    for done, (name, weight) in enumerate(weights, start=1):
        if on_weight is not None:
            on_weight(done, len(weights))
        if weight.ndim == 1:
            weight.data.fill_(1.0)
            continue
        # [out, in]: a row's dot product with unit-variance input has variance std**2 * in.
        std = (LOGIT_STD if name.startswith("lm_head") else 1.0) / math.sqrt(weight.shape[1])
        if name.endswith("embed_tokens.weight"):
            std = 1.0
        noise = torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        weight.data.copy_(noise)
