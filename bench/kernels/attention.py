"""Tree attention: compared with its specification, and timed beside FlashAttention 3."""

from __future__ import annotations

import functools
import importlib
from dataclasses import asdict
from typing import Any

import torch
from vllm_specrollout.kernels.tree_attention.naive import naive_tree_attention

from . import flash
from .inputs import AttentionInputs, make_attention
from .shapes import Attention
from .timing import Call, Timer

TOLERANCE = 2e-2
"""Most a bf16 output of unit-variance values may differ from exact arithmetic; of a value beyond 1, its share.

Weights and output are each rounded to bf16, and Triton's interpreter rounds towards zero: up to 0.8 % of the value, all
in one direction. 0.9 % is the worst of 672 random cases.
"""
_COLD_BYTES, _MOST_LAYERS, _FEWEST_LAYERS = 256 << 20, 28, 4
"""Keys and values that a graph's calls read together, so that none finds them in the L2 cache; and how many calls."""


def load() -> Any:
    """Our kernel; only here, for what else is measured does without it."""
    return importlib.import_module("vllm_specrollout.kernels.tree_attention.kernel").attend_to_nodes


def ours(inputs: AttentionInputs, device: str, kernel: Any) -> Call:
    """A step's attention in two launches, as in an engine: FlashAttention over the context, our kernel over nodes."""
    over_context = flash.context(inputs) if device == "cuda" else functools.partial(_over_context, inputs)
    starts, size = inputs.query_start_loc, inputs.case.model.head_size
    keys, values = inputs.own[..., :size], inputs.own[..., size:]

    def call() -> torch.Tensor:
        out, lse = over_context()
        kernel(
            inputs.query, keys, values, out, lse, starts, inputs.num_nodes, inputs.ancestors,
            **inputs.options, most_nodes=inputs.case.nodes,
        )  # fmt: skip
        return out

    return call


def _over_context(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What `flash.context` yields, where FlashAttention cannot run."""
    out, lse = torch.empty_like(inputs.query), torch.empty(inputs.case.model.heads, len(inputs.query))
    group, cap, rows = (
        inputs.case.model.heads // inputs.case.model.kv_heads,
        inputs.case.model.softcap,
        inputs.case.rows,
    )
    for r, length in enumerate(inputs.context_lens.tolist()):
        own = slice(r * rows, (r + 1) * rows)
        keys, values = (
            part[inputs.block_table[r].long()]
            .transpose(1, 2)
            .flatten(0, 1)[:length]
            .float()
            .repeat_interleave(group, 1)
            for part in (inputs.keys, inputs.values)
        )
        scores = torch.einsum("qhd,khd->hqk", inputs.query[own].float(), keys) * inputs.scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        lse[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out, lse


def specified(inputs: AttentionInputs) -> torch.Tensor:
    """[rows, heads, head size] float64: what the two should compute."""
    return naive_tree_attention(inputs.query, inputs.keys, inputs.values, *inputs.step, **inputs.options)


def excess(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far off the worst value is, as `TOLERANCE` counts it; NaN if any value is."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


def checked(case: Attention, device: str, kernel: Any = None) -> dict[str, Any]:
    """Whether ours, or another kernel in its place, is right on random inputs."""
    return _compared(make_attention(case, device), device, kernel or load())


def _compared(inputs: AttentionInputs, device: str, kernel: Any) -> dict[str, Any]:
    off = excess(ours(inputs, device, kernel)().double(), specified(inputs))
    told = f"differs from the specification by {off:.3g}, of {TOLERANCE:g} allowed"
    return {"passed": off <= TOLERANCE, "checked": told}


def measure(timer: Timer, case: Attention, device: str, layers: int | None = None) -> dict[str, Any]:
    """Times of one layer's attention by every way there is, with a check of ours; see docs/gpu.md for the fields.

    A way that cannot run here is left out with a note. Ours is not timed if it is wrong.

    Args:
        layers: calls that are timed together, each with its own keys and values.

    Raises:
        Exception: what left the device in no state to go on.
    """
    layers = layers or max(_FEWEST_LAYERS, min(_MOST_LAYERS, -(-_COLD_BYTES // case.cache_bytes)))
    inputs = [make_attention(case, device) for _ in range(layers)]
    kernel = load()
    ways, notes = _flash_ways(inputs, device)
    told = _compared(inputs[0], device, kernel)
    if told["passed"]:
        ways = {"ours": [ours(one, device, kernel) for one in inputs], **ways}
    else:
        notes.append("ours is wrong, so it is not timed")
    times = {}
    for name, made in ways.items():
        try:
            times[name] = asdict(timer.time(made))
        except Exception as error:
            notes.append(_note(name, error, device))
    return {**told, "layers": layers, "notes": notes, "times": times, **timer.roof(case.least_bytes)}


def _note(name: str, error: Exception, device: str) -> str:
    """Why a way is missing; but the error itself goes on where the device is in no state to try another."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=device).item()
        except Exception:
            raise error from None
    return f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


Ways = dict[str, list[Call]]


def _flash_ways(inputs: list[AttentionInputs], device: str) -> tuple[Ways, list[str]]:
    """FlashAttention's ways, each tried once, and why others are missing."""
    if device != "cuda":
        return {}, ["FlashAttention 3 needs a GPU"]
    makers: dict[str, Any] = {
        "fa3 graph": lambda one: flash.causal(one, flash.graph_splits()),
        "fa3 auto": lambda one: flash.causal(one, flash.AUTO),
        "fa3 context": flash.context,
    }
    ways, notes = {}, []
    for name, make in makers.items():
        try:
            made = [make(one) for one in inputs]
            made[0]()
            torch.cuda.synchronize()
            ways[name] = made
        except Exception as error:
            notes.append(_note(name, error, device))
    return ways, notes
