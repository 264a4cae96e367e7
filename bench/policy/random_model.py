"""Models with random weights and a chosen size, for pure speed runs and for tests of many architectures.

May enter: torch, transformers, the policy's tokenizer. May not: vLLM, task rules.

Scales: embeddings have variance 1 and every projection keeps the variance of its input, so no layer drowns the
others; the output head gives logits a standard deviation of `LOGIT_STD`, so that sampling at temperature 1 is neither
fixed nor uniform (with 407 tokens the entropy is about 3.4 nats).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PolicyError
from .shapes import Shape, shape_of_size
from .tokenizer import MAX_LEN, build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ARCHS = ("qwen3", "llama", "mistral")
LOGIT_STD = 2.5
"""Standard deviation of a row of logits."""
DEFAULT_WINDOW = 64
"""Sliding window of `mistral` in tokens; short, so that tests cross it soon."""


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

    if arch not in ARCHS:
        raise PolicyError(f"unknown architecture {arch!r}, known are {', '.join(ARCHS)}", hint="choose one of these")
    if dtype not in ("bfloat16", "float32"):
        raise PolicyError(f"dtype is {dtype!r}, known are bfloat16 and float32", hint="choose one of these")
    if sliding_window is not None and arch != "mistral":
        raise PolicyError(f"{arch} has no sliding window, but {sliding_window} was given", hint="use arch mistral")
    tokenizer = build_tokenizer()
    vocab_size = len(tokenizer) if vocab_size is None else vocab_size
    if vocab_size < len(tokenizer):
        raise PolicyError(
            f"vocab_size is {vocab_size}, the tokenizer has {len(tokenizer)} tokens", hint="leave vocab_size out"
        )
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

    from .vocabulary import END, PAD, SPECIALS

    common = {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
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
        std = 1.0 / math.sqrt(weight.shape[1])
        if name.endswith("embed_tokens.weight"):
            std = 1.0
        elif name.startswith("lm_head"):
            std *= LOGIT_STD
        noise = torch.empty(weight.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        weight.data.copy_(noise)
