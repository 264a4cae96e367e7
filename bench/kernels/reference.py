"""What the kernels should compute: their specifications (`naive.py` beside each), asked for these inputs."""

from __future__ import annotations

import torch
from vllm_specrollout.kernels.kv_commit import naive as commit
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention
from vllm_specrollout.kernels.tree_verify.naive import sample_rows, walk

from .inputs import AttentionInputs

TOLERANCE = 2e-2
"""Most a bf16 output of unit-variance values may differ from exact arithmetic; of a value beyond 1, its share.

Weights and output are each rounded to bf16, and Triton's interpreter rounds towards zero: up to 0.8 % of the value, all
in one direction. 0.9 % is the worst of 672 random cases.
"""


def excess(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far off the worst value is, as `TOLERANCE` counts it; NaN if any value is."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


def attention(inputs: AttentionInputs) -> torch.Tensor:
    """[rows, heads, head size] float64."""
    return naive_tree_attention(inputs.query, inputs.keys, inputs.values, *inputs.step, scale=inputs.scale)


def verdict(arguments: dict[str, torch.Tensor]) -> list[list[int]]:
    """Tokens of each request."""
    names = ("request_index", "temperature", "seeds", "pos")
    sampled = sample_rows(arguments["logits"], *(arguments[name].tolist() for name in names))
    drafts, parents = arguments["draft_ids"].tolist(), arguments["parents"].tolist()
    bounds = arguments["cu_rows"].tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    return [list(walk(sampled[i:j], drafts[i:j], parents[i:j])[0]) for i, j in pairs]


def committed(layers: list[torch.Tensor], arguments: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the caches after the commit."""
    after = [layer.clone() for layer in layers]
    commit.kv_commit(after, *arguments.values())
    return after
