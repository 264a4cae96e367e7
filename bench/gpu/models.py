"""Folders that hold a model's shape and nothing else: vLLM fills in the weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..kernels.shapes import MODELS

VOCAB = {model.name: model.vocab for model in MODELS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of a Qwen2.5 model, under the names of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 1 << 16

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers, bf16."""
        head = self.hidden_size // self.num_attention_heads
        return 4 * self.num_hidden_layers * self.num_key_value_heads * head

    @property
    def weight_bytes(self) -> int:
        """All weights, bf16; embeddings and output head are not shared."""
        head = self.hidden_size // self.num_attention_heads
        attention = 2 * self.hidden_size * head * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return 2 * (self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size)


CONFIGS = {
    "7B": Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=VOCAB["7B"],
    ),
    "0.5B": Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=VOCAB["0.5B"],
    ),
    # for trying the script itself
    "tiny": Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=512,
    ),
}


def write(name: str, folder: Path, vocab: int | None = None) -> Path:
    """Write the model's config.json into `folder` and return it.

    Args:
        vocab: in place of its own, for a drafter of a model with another vocabulary.
    """
    sizes = {**asdict(CONFIGS[name]), **({} if vocab is None else {"vocab_size": vocab})}
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        **sizes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
