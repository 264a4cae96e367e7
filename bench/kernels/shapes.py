"""Shapes that kernels and engines are measured at: models, batches, trees. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import IntArray

from .mask import ancestor_mask

BLOCK_SIZE = 16
"""Tokens of a KV cache block: vLLM's default on CUDA."""
MOST_NODES = 63
_BF16, _NODES = 2, (7,)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's sizes."""

    heads: int
    kv_heads: int
    head_size: int
    layers: int
    vocab: int
    # width of the MLP
    intermediate: int
    # bound of the scores; 0: none
    softcap: float = 0.0

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, bf16."""
        return 2 * self.kv_heads * self.head_size * _BF16


MODELS = {
    "7B": Model(28, 4, 128, 28, 152064, 18944),
    "1.5B": Model(12, 2, 128, 28, 151936, 8960),
    "0.5B": Model(14, 2, 64, 24, 151936, 4864),
}
"""Qwen2.5's."""
CHECKED = {
    **MODELS,
    "Qwen3 8B": Model(32, 8, 128, 36, 151936, 12288),
    "Qwen3 8B, a rank of 8": Model(4, 1, 128, 36, 151936, 12288),
    "Llama 2 7B": Model(32, 32, 128, 32, 32000, 11008),
    "heads of 256, capped": Model(16, 8, 256, 42, 256000, 14336, softcap=50.0),
}
"""Shapes at which attention is compared; the last is Gemma 2 9B's, without its windows."""
ATTENTION_CHECKS = (
    (53, 2, 7, "tree"),
    (53, 2, 63, "tree"),
    (53, 2, 31, "chain"),
    (1605, 3, 15, "tree"),
)
"""(context, batch, nodes, kind) at which tree attention is compared with its specification; FlashAttention splits the
last's context."""
VERIFY_CHECKS = ((1, 0), (3, 7), (2, 31))
COMMIT_CHECKS = ((1, 7), (3, 31))
"""(batch, nodes) likewise."""


@dataclass(frozen=True, slots=True)
class Cell:
    """So many requests at once, each with so many tokens of context; and with how many draft nodes each, in turn."""

    BLOCK: ClassVar[int] = 64
    """Contexts are multiples of it, so that the prefix cache holds them whole in any engine's blocks."""

    batch: int
    context: int
    nodes: tuple[int, ...] = _NODES

    @classmethod
    def parse(cls, text: str, flag: str = "--cells") -> Cell:
        """`8x1024:3,7` -> Cell(8, 1024, (3, 7)); nodes may be left out.

        Raises:
            ConfigError: anything else.
        """
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\d+(?:,\d+)*))?", text)
        nodes = tuple(map(int, found[3].split(","))) if found and found[3] else _NODES
        if not found or int(found[2]) % cls.BLOCK or max(nodes) > MOST_NODES:
            way = f"give BATCHxCONTEXT:NODES, CONTEXT a multiple of {cls.BLOCK}, NODES up to {MOST_NODES}"
            raise ConfigError(f"`{flag}` holds {text!r}", f"{way}: `{flag} 1x1024:15,64x512:1,3`")
        return cls(int(found[1]), int(found[2]), nodes)

    @classmethod
    def parse_all(cls, text: str, flag: str) -> tuple[Cell, ...]:
        """`1x1024:15,64x512:1,3`, in the order given."""
        # what no `x` follows is one more number of nodes
        return tuple(cls.parse(part.strip(), flag) for part in re.split(r",(?=\s*\d+x)", text))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True, slots=True)
class Attention:
    """One verification step's attention: every request has its last token (the root, part of the context) and nodes."""

    model: Model
    context: int
    batch: int
    nodes: int
    # `chain` or `tree`
    kind: str

    @property
    def rows(self) -> int:
        """Query rows of one request."""
        return 1 + self.nodes

    @property
    def seq_len(self) -> int:
        return self.context + self.nodes

    @property
    def blocks(self) -> int:
        """KV cache blocks of one request, which hold the largest tree's nodes."""
        return -(-(self.context + MOST_NODES) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judging one step: `batch` requests with `nodes` nodes each, over a vocabulary; and moving what was accepted."""

    model: Model
    batch: int
    nodes: int

    @property
    def rows(self) -> int:
        return self.batch * (1 + self.nodes)


def tree(nodes: int, kind: str) -> IntArray:
    """Parents of `nodes` nodes, -1 for the root: a chain, or a binary tree, filled level by level."""
    index = np.arange(nodes, dtype=np.int32)
    return index - 1 if kind == "chain" else np.where(index > 0, (index - 1) // 2, -1).astype(np.int32)


def ancestor_words(nodes: int, kind: str) -> list[int]:
    """The kernels' masks of one request's rows, the root's first: signed 64-bit, bit j for node j."""
    return [0, *ancestor_mask(tree(nodes, kind)).view(np.int64).tolist()]
