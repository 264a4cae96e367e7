"""Inputs of one step's drafts: rows that are laid out on the device from what was drafted there.

Rows are those of the forward pass, in batch order; a drafting request's last rows are its last known token (the root)
and its nodes. Buffers that the attention kernel reads live as long as the engine, so that a captured graph finds them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.kernels.tree_rows.kernel import lay_out


class TreeInputs:
    """The step's trees, as attention, sampling and the KV cache are told of them."""

    def __init__(self, max_reqs: int, max_rows: int, device: torch.device) -> None:
        self._device = device
        # [2, max_reqs] of each request of the batch, in batch order
        self._of_requests = torch.zeros(2, max_reqs, dtype=torch.int32, device=device)
        # [max_reqs] nodes, and keys below the first of them; of no request: 0
        self.num_nodes, self.context_lens = self._of_requests
        # [max_rows] bit j: node j of the row's request is the row's node or above it
        self.ancestors = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # [max_rows] how far a row's position lies behind its place
        self._shifts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # [logits rows] each row's parent, counted from its request's root row; -1 for the root
        self.parents: torch.Tensor | None = None
        # [logits rows] the token that each row was computed for; -1: none that is sampled
        self.draft_ids: torch.Tensor | None = None
        # [num_groups' first, rows] KV slots, set when they are known
        self.slots: torch.Tensor | None = None
        # the step's drafts may be trees, not chains alone; known before the step's graph is chosen
        self.has_branches = False
        # rows attend by ancestors: where there are branches, and while the graphs of such steps are captured
        self.by_ancestors = False
        self._shift: torch.Tensor | None = None

    def clear(self) -> None:
        self.parents = self.draft_ids = self.slots = self._shift = None
        self.has_branches = self.by_ancestors = False

    def set_drafted(self, batch: InputBatch, drafted: torch.Tensor) -> None:
        """Lay the step's drafts out over its rows.

        Args:
            drafted: [rows of requests, 3, most drafts] int32 tokens (-1: none, and vLLM put that into the inputs),
                parents, and what is of no interest here.
        """
        # apart, since kernels are compiled for addresses that 16 divides
        parents, draft_ids = (
            torch.empty(len(batch.logits_indices), dtype=torch.int32, device=self._device) for _ in range(2)
        )
        self.by_ancestors = self.has_branches
        if self.has_branches:
            # those of padding as well
            self._of_requests.zero_()
        lay_out(
            drafted, batch.idx_mapping, batch.cu_num_logits, batch.query_start_loc, batch.input_ids,
            parents, draft_ids, self.num_nodes, self.ancestors, self._shifts, has_branches=self.has_branches,
        )  # fmt: skip
        self.parents, self.draft_ids = parents, draft_ids
        if self.has_branches:
            count = len(batch.idx_mapping)
            torch.sub(batch.seq_lens[:count], self.num_nodes[:count], out=self.context_lens[:count])
            self._shift = self._shifts[: batch.num_tokens]

    def shift_positions(self, positions: torch.Tensor) -> None:
        """Rewrite positions [..., rows] in place: those of nodes follow their depth, not their place in the order."""
        if self._shift is not None:
            positions[..., : len(self._shift)] += self._shift


def accepted_first(
    batch: InputBatch, path: torch.Tensor, num_sampled: torch.Tensor, states: list[torch.Tensor]
) -> tuple[InputBatch, list[torch.Tensor]]:
    """A step with branches as if the accepted nodes had been drafted as a chain: what vLLM's speculators read.

    Keys and values that they write go where the rows' order says, so those of accepted nodes end up one behind another.

    Args:
        path: [R, width] rows of the accepted paths, counted from the roots'.
        num_sampled: [R] how many of them count.
        states: [rows, ...] each, of the step's rows and of padding.

    Returns:
        a copy of the batch, and of the states.
    """
    starts, place = batch.query_start_loc[: len(path), None].long(), torch.arange(path.shape[1], device=path.device)
    rows = torch.arange(1 + max(len(states[0]), len(batch.input_ids), len(batch.positions)), device=path.device)
    # what does not count goes behind all rows
    there = torch.where(place < num_sampled[:, None], starts + place, len(rows) - 1)
    order = rows.scatter(0, there.flatten(), (starts + path.long()).flatten())
    copied = copy.copy(batch)
    copied.input_ids = batch.input_ids[order[: len(batch.input_ids)]]
    copied.positions = batch.positions[order[: len(batch.positions)]]
    return copied, [state[order[: len(state)]] for state in states]


def follow_depths(rope: Any, inputs: TreeInputs) -> None:
    """Have positions of several dimensions (M-RoPE) follow the nodes' depths, which go on alike in each of them.

    Args:
        rope: vLLM's `RopeState`.
    """
    stock = rope.prepare_positions

    def prepare_positions(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        inputs.shift_positions(rope.positions)

    rope.prepare_positions = prepare_positions


def holds_prompt(scheduler_output: SchedulerOutput) -> bool:
    """Whether some request computes more than its last token and its room: a piece of a prompt."""
    room = scheduler_output.scheduled_spec_decode_tokens
    return any(
        rows > 1 + len(room.get(request_id, ())) for request_id, rows in scheduler_output.num_scheduled_tokens.items()
    )


def emptied(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """A copy of a step's schedule without the room that was left for drafts."""
    step = copy.copy(scheduler_output)
    step.num_scheduled_tokens = dict(scheduler_output.num_scheduled_tokens)
    for request_id, placeholders in scheduler_output.scheduled_spec_decode_tokens.items():
        step.num_scheduled_tokens[request_id] -= len(placeholders)
        step.total_num_scheduled_tokens -= len(placeholders)
    step.scheduled_spec_decode_tokens = {}
    return step
