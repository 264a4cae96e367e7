"""Model shapes by size name, shared by the random and the inflated models.

May enter: integers. May not: torch, transformers.
"""

from dataclasses import dataclass, replace

from .errors import PolicyError

HEAD_DIM = 64
"""Head size of every model here; one that vLLM's CPU attention supports."""


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
}


def shape_of_size(size: str, *, hidden: int | None = None, num_layers: int | None = None) -> Shape:
    """The shape named `size`, with its hidden width or number of layers replaced if given."""
    if size not in SHAPES:
        raise PolicyError(f"unknown model size {size!r}, known are {', '.join(SHAPES)}", hint="choose one of these")
    for name, value in (("hidden", hidden), ("num_layers", num_layers)):
        if value is not None and value < 1:
            raise PolicyError(f"{name} is {value}, the least is 1", hint=f"leave {name} out, or give a positive number")
    shape = SHAPES[size]
    return replace(shape, hidden=hidden or shape.hidden, num_layers=num_layers or shape.num_layers)
