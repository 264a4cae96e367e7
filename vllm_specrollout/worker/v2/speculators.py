"""vLLM's speculators of the V2 runner, called alike whatever the version: their classes, and the calls that differ."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode import init_speculator

from vllm_specrollout.patches import features

_ROW = features.installed()
_CLASSES = {
    "target_dependent_ar": "TargetDependentARSpeculator",
    "autoregressive": "AutoRegressiveSpeculator",
    "standalone_ar": "StandaloneARSpeculator",
    "draft_model": "PlainDraftModelSpeculator",
}
_IS_NEWER = _ROW.v2_heads == "target_dependent_ar"


def _class_in(folder: str) -> Any:
    return getattr(importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{folder}.speculator"), _CLASSES[folder])


HEADS: type = _class_in(_ROW.v2_heads)
"""Heads over the target's hidden states are of this class."""
MODELS: tuple[type, ...] = (_class_in(_ROW.v2_models),) if _ROW.v2_models else ()
"""Small models are of this class, if this vLLM has one on its V2 runner."""
prepare_decode_inputs = importlib.import_module(HEADS.__module__).prepare_decode_inputs


def made(config: VllmConfig, device: torch.device, req_states: Any) -> Any:
    """The speculator of this configuration.

    Args:
        req_states: vLLM's, of the target's runner.
    """
    return init_speculator(config, device, *((req_states,) if _IS_NEWER else ()))


def draft_logits(speculator: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[R, vocab] of hidden states [R, width]."""
    if hasattr(speculator, "compute_draft_logits"):
        return speculator.compute_draft_logits(hidden, 0)
    return speculator.model.compute_logits(hidden)


def hidden_for_heads(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[rows, width] what a head is fed with: a few targets keep other states for it than those they return."""
    own = getattr(model, "get_mtp_target_hidden_states", lambda: None)()
    return hidden if own is None else own[: len(hidden)]


def attention_of(speculator: Any, starts: np.ndarray, lengths: torch.Tensor, slots: torch.Tensor) -> Any:
    """Attention's metadata of a pass over rows that are laid out in its buffers.

    Args:
        starts: [R + 1] int32 first row of each request.
        lengths: [R] int32 what attention sees from each request's last row, at most.
        slots: [groups, rows]; those of heads stand in the block tables, where all versions look for them.
    """
    rows, requests = int(starts[-1]), len(starts) - 1
    common = {
        "num_reqs": requests,
        "query_start_loc_np": starts,
        "seq_lens_cpu_upper_bound": lengths,
        "step": 0,
    }
    if not hasattr(speculator, "_build_attn_metadata"):
        return speculator._build_draft_attn_metadata(num_reqs_padded=requests, num_tokens_padded=rows, **common)
    shape = BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=rows, num_reqs=requests)
    if isinstance(speculator, MODELS):
        common["slot_mappings"] = slots
    return speculator._build_attn_metadata(batch_desc=shape, **common)


def decode_head(speculator: Any, requests: int, lengths: torch.Tensor, depth: int) -> None:
    """The passes of a head behind its first one."""
    one_each = BatchExecutionDescriptor(
        CUDAGraphMode.NONE, num_tokens=requests, num_reqs=requests, uniform_token_count=1
    )
    more = (depth,) if _IS_NEWER else ()
    with levels(speculator, depth):
        speculator._multi_step_decode(requests, False, one_each, None, lengths, *more)


@contextmanager
def levels(speculator: Any, depth: int) -> Iterator[None]:
    """A speculator that drafts so many levels, where its loop asks for no number."""
    most, speculator.num_speculative_steps = speculator.num_speculative_steps, depth
    try:
        yield
    finally:
        speculator.num_speculative_steps = most
