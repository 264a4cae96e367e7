"""vLLM's thinking budgets (`thinking_token_budget`) on the V1 runner: counted in every step, forced at root rows.

A request that has a budget has no drafts, so it has a root row alone. vLLM counts its thinking, and forces the end of
it, in each step that samples it: also in those in which others have drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm_specrollout.types import TreeBatch


def at_roots(holder: Any, trees: TreeBatch) -> Any:
    """The holder of all budgets, with a row for each request and for each of its nodes.

    The states stay the holder's own, so what is counted is counted for good.
    """
    spread = copy.copy(holder)
    spread._state = {int(trees.node_start[row]) + row: state for row, state in holder._state.items()}
    spread.cu_num_tokens = {}
    spread._mask_capacity = trees.num_requests + trees.num_nodes
    return spread


def clear_inherited(batch: Any, requests: Mapping[str, Any]) -> None:
    """A request without a budget must not be ended by that of another one.

    In vLLM 0.32.0 one that moves to the row of a request that is over takes up its state.
    """
    holder = batch.thinking_budget_state_holder
    for row in list(holder._state):
        state = requests[batch.req_ids[row]] if row < batch.num_reqs else None
        if state is None or state.sampling_params.thinking_token_budget is None:
            del holder._state[row]


def follow_plain_steps(batch: Any) -> None:
    """Where a model drafts, vLLM's holder expects the rows of vLLM's own speculation, which are never sampled here."""
    holder = batch.thinking_budget_state_holder
    if holder is not None:
        holder.in_spec_mode, holder.num_spec_tokens = False, 0
