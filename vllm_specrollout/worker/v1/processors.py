"""vLLM's built-in logits processors, spread from one row per request to one row per node.

Each is copied with its tensors gathered by row, so that the arithmetic stays vLLM's own `apply`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

BUILTIN = (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)


def are_builtin(processors: LogitsProcessors) -> bool:
    """True if every processor is one that can be spread over nodes exactly."""
    return all(type(p) in BUILTIN for p in processors.all)


def spread(processors: LogitsProcessors, row_request: list[int], row_depth: list[int]) -> LogitsProcessors:
    """Processors for a batch of node rows.

    Args:
        processors: those of the batch, one row per request.
        row_request: [rows] request of each row.
        row_depth: [rows] tokens the row's node is ahead of the request's output; 0 for the root.
    """
    spread_out = LogitsProcessors()
    for processor in processors.argmax_invariant:
        spread_out.argmax_invariant.append(_spread_min_p(processor, row_request))
    for processor in processors.non_argmax_invariant:
        if isinstance(processor, LogitBiasLogitsProcessor):
            spread_out.non_argmax_invariant.append(_spread_bias(processor, row_request))
        else:
            spread_out.non_argmax_invariant.append(_spread_min_tokens(processor, row_request, row_depth))
    return spread_out


def _spread_min_p(processor: Any, row_request: list[int]) -> Any:
    clone = copy.copy(processor)
    if processor.min_p_count:
        clone.min_p = processor.min_p[torch.tensor(row_request, device=processor.min_p.device)]
    return clone


def _spread_bias(processor: Any, row_request: list[int]) -> Any:
    clone = copy.copy(processor)
    if not processor.biases:
        return clone
    clone.biases = {row: processor.biases[r] for row, r in enumerate(row_request) if r in processor.biases}
    rows = [row for row, bias in clone.biases.items() for _ in bias]
    tokens = [token for bias in clone.biases.values() for token in bias]
    biases = [b for bias in clone.biases.values() for b in bias.values()]
    clone.bias_tensor = torch.tensor(biases, dtype=torch.float32, device=processor.device)
    clone.logits_slice = _slice(processor, rows, tokens)
    return clone


def _spread_min_tokens(processor: Any, row_request: list[int], row_depth: list[int]) -> Any:
    clone = copy.copy(processor)
    clone.min_toks = {}
    for row, (r, depth) in enumerate(zip(row_request, row_depth, strict=True)):
        entry = processor.min_toks.get(r)
        if entry is not None and len(entry[1]) + depth < entry[0]:
            clone.min_toks[row] = entry
    rows: list[int] = []
    tokens: list[int] = []
    restore_rows: list[int] = []
    restore_tokens: list[int] = []
    for row, (_, _, stop_tokens, has_grammar) in clone.min_toks.items():
        rows += [row] * len(stop_tokens)
        tokens += stop_tokens
        if has_grammar:
            restore_rows += [row] * len(stop_tokens)
            restore_tokens += stop_tokens
    clone.logits_slice = _slice(processor, rows, tokens)
    clone.restore_logits_slice = _slice(processor, restore_rows, restore_tokens)
    return clone


def _slice(processor: Any, rows: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[entries] row and token of each logit that the processor changes, where the logits are."""
    return (
        torch.tensor(rows, dtype=torch.int32, device=processor.device),
        torch.tensor(tokens, dtype=torch.int32, device=processor.device),
    )
