"""Tree attention in its two launches, compared with its specification."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention

from . import flash
from .inputs import AttentionInputs, make_attention
from .shapes import Attention
from .timing import Call

TOLERANCE = 2e-2
"""Most a bf16 output of unit-variance values may differ from exact arithmetic; of a value beyond 1, its share.

Weights and output are each rounded to bf16, and Triton's interpreter rounds towards zero: up to 0.8 % of the value, all
in one direction. 0.9 % is the worst of 672 random cases.
"""


def load() -> Any:
    """Our kernel; only here, for what else is measured does without it."""
    return importlib.import_module("vllm_specrollout.kernels.tree_attention.kernel").attend_to_nodes


def ours(inputs: AttentionInputs, kernel: Any) -> Call:
    """A step's attention as in an engine: FlashAttention over the context, then our kernel over the nodes."""
    over_context, size = flash.context(inputs), inputs.case.model.head_size
    keys, values = inputs.own[..., :size], inputs.own[..., size:]

    def call() -> torch.Tensor:
        out, lse = over_context()
        kernel(
            inputs.query, keys, values, out, lse, inputs.query_start_loc, inputs.num_nodes, inputs.ancestors,
            **inputs.options, most_nodes=inputs.case.nodes,
        )  # fmt: skip
        return out

    return call


def specified(inputs: AttentionInputs) -> torch.Tensor:
    """[rows, heads, head size] float64: what the two should compute."""
    return naive_tree_attention(inputs.query, inputs.keys, inputs.values, *inputs.step, **inputs.options)


def excess(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far off the worst value is, as `TOLERANCE` counts it; NaN if any value is."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


def checked(case: Attention, device: str, kernel: Any = None) -> dict[str, Any]:
    """Whether ours, or another kernel in its place, is right on random inputs."""
    inputs = make_attention(case, device)
    off = excess(ours(inputs, kernel or load())().double(), specified(inputs))
    told = f"differs from the specification by {off:.3g}, of {TOLERANCE:g} allowed"
    return {"passed": off <= TOLERANCE, "checked": told}
