"""Compiles our kernels before the first request: in the middle of a rollout each would stop it for seconds.

Every kernel is launched once in every form that a step may launch it in, on no rows or on rows of its own. Nothing that
belongs to a request is read or written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.v2.attention import attention_layers

if TYPE_CHECKING:
    from vllm_specrollout.worker.v2.runner import SpecRolloutV2


@torch.inference_mode()
def warm_up(runner: SpecRolloutV2) -> None:
    """After the KV cache is set up, and before graphs are captured."""
    if runner.shape[0] is DraftMode.OFF:
        return
    runner.verifier.warm_up(runner.vocab_size, runner.dtype, runner.device)
    if runner.mover is None:
        return
    runner.mover.warm_up(1 + runner.max_draft_tokens)
    if runner.experts is not None:
        runner.experts.warm_up(1 + runner.max_draft_tokens)
    block_table = runner.block_tables.input_block_tables[0][:1]
    for layer in attention_layers(runner):
        layer.impl.warm_up(layer, runner.dtype, block_table)
