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
    return importlib.import_module("vllm_specrollout.kernels.tree_attention.kernel").tree_attention


def specified(inputs: AttentionInputs) -> torch.Tensor:
    """[rows, heads, head size] float64: what the kernel should compute."""
    return naive_tree_attention(inputs.query, inputs.keys, inputs.values, *inputs.step, **inputs.options)


def excess(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far off the worst value is, as `TOLERANCE` counts it; NaN if any value is."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


def _compared(found: torch.Tensor, wanted: torch.Tensor, name: str) -> dict[str, Any]:
    off = excess(found.double(), wanted.double())
    return {"passed": off <= TOLERANCE, "checked": f"differs from {name} by {off:.3g}, of {TOLERANCE:g} allowed"}


def checked(case: Attention, device: str, kernel: Any = None) -> dict[str, Any]:
    """Whether ours, or another kernel in its place, is right on random inputs."""
    inputs = make_attention(case, device)
    return _compared(inputs.call(kernel or load()), specified(inputs), "the specification")


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
    told = _beside(kernel, inputs[0], ways)
    if told["passed"]:
        ways = {"ours": [functools.partial(one.call, kernel) for one in inputs], **ways}
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
    }
    if inputs[0].case.nodes:
        makers |= {"fa3 context": flash.context, "fa3 merged": flash.merged}
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


def _beside(kernel: Any, inputs: AttentionInputs, ways: Ways) -> dict[str, Any]:
    """Whether ours is what another way of computing the same yields, at the very shape that is timed."""
    found = inputs.call(kernel)
    if "fa3 merged" in ways:
        name = "FlashAttention 3 over the context and PyTorch over the nodes"
        return _compared(found, ways["fa3 merged"][0](), name)
    if not inputs.case.nodes and "fa3 graph" in ways:
        return _compared(found, ways["fa3 graph"][0](), "FlashAttention 3")
    return _compared(found, specified(inputs), "the specification")
