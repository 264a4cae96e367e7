"""Inputs of one step's drafts on the device: one packed copy from the host, nothing read back.

Rows are those of the forward pass, in batch order; a drafting request's rows are its last known token (the root) and
its nodes. Buffers that the attention kernel reads live as long as the engine, so that a captured graph finds them.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout import _core
from vllm_specrollout.kernels.tree_rows.kernel import lay_out
from vllm_specrollout.trees.batch import token_lists
from vllm_specrollout.types import TreeBatch


class TreeInputs:
    """The step's trees on the device.

    All of it lies in one buffer. In its middle stands what the attention kernel reads: the requests' nodes, then the
    rows' ancestors. What this step alone reads stands before that and ends there, so that one copy brings both.
    """

    def __init__(self, max_reqs: int, max_rows: int, max_draft_tokens: int, device: torch.device) -> None:
        self.device = device
        self.max_draft_tokens = max_draft_tokens
        # words of 8 bytes, an even number of each: kernels are compiled for addresses that 16 divides
        self._middle = 2 * _even(max_rows + 1) + _even(max_rows)
        self._ancestors = self._middle + _even(-(-max_reqs // 2))
        self._words = torch.zeros(self._ancestors + max_rows, dtype=torch.int64, device=device)
        self._halves = self._words.view(torch.int32)
        # [max_reqs] nodes of each request of the batch, in batch order; 0: rows attend causally
        self.num_nodes = self._halves[2 * self._middle :][:max_reqs]
        # [max_rows] bit j: node j of the row's request is the row's node or above it
        self.ancestors = self._words[self._ancestors :]
        # [logits rows] each row's parent, counted from its request's root row; -1 for the root
        self.parents: torch.Tensor | None = None
        # [logits rows] the token that each row was computed for, -1 where none was drafted; None: the step's own inputs
        self.draft_ids: torch.Tensor | None = None
        # [num_groups' first, rows] KV slots, set when they are known
        self.slots: torch.Tensor | None = None
        # some request of the step has a tree, not a chain; known before the step's graph is chosen
        self.has_branches = False
        # rows attend by ancestors: where there are branches, and while the graphs of such steps are captured
        self.by_ancestors = False
        self.always_by_ancestors = False
        self._shift: torch.Tensor | None = None
        # [max_rows] int32, where the device lays rows out
        self._shifts: torch.Tensor | None = None
        self._is_dirty = False

    def clear(self) -> None:
        self.parents = self.draft_ids = self.slots = self._shift = None
        self.has_branches = self.by_ancestors = False

    def expect(self, trees: TreeBatch) -> None:
        """These are the step's drafts."""
        # of all trees of its size, a chain is the one whose nodes lie deepest
        sizes = trees.sizes.astype(np.int64)
        self.has_branches = 2 * int(trees.depth.sum()) < int((sizes * (sizes + 1)).sum())

    def set_plain(self) -> None:
        """No drafts in this step, or none that the attention kernel must know."""
        if self._is_dirty:
            self.num_nodes.zero_()
            self._is_dirty = False

    def set_trees(self, batch: InputBatch, trees: TreeBatch) -> None:
        """Lay the trees of the step out over its rows, and put their tokens there.

        Args:
            trees: over requests of the batch, in any order; all their nodes have rows in it.
        """
        num_logits, num_rows, num_nodes = int(batch.cu_num_logits_np[-1]), batch.num_tokens, trees.num_nodes
        self.by_ancestors = self.has_branches or self.always_by_ancestors
        # rows of the nodes, behind the parents (at an address that 16 divides), tokens and shifts
        num_small = -(-(num_logits + num_nodes + num_rows) // 2)
        begin = self._middle - _even(num_small + num_nodes)
        packed = np.zeros(self._ancestors + num_rows - begin, dtype=np.int64)
        small, middle = packed.view(np.int32), self._middle - begin
        tokens_at, shift_at = num_logits, num_logits + num_nodes
        place = {name: i for i, name in enumerate(trees.request_ids)}
        _core.tree_rows(
            trees.node_start,
            trees.parents,
            trees.depth,
            trees.token_ids,
            np.fromiter((place.get(name, -1) for name in batch.req_ids), np.int32, len(batch.req_ids)),
            batch.cu_num_logits_np,
            batch.query_start_loc_np[: len(batch.req_ids) + 1],
            small[:tokens_at],
            small[tokens_at:shift_at],
            small[shift_at : shift_at + num_rows],
            packed[num_small : num_small + num_nodes],
            small[2 * middle : 2 * middle + len(batch.req_ids)],
            packed[self._ancestors - begin :].view(np.uint64),
        )
        end = self._ancestors + num_rows if self.by_ancestors else self._middle
        words = torch.from_numpy(packed[: end - begin])
        self._words[begin:end].copy_(words.pin_memory() if PIN_MEMORY else words, non_blocking=True)
        halves = self._halves[2 * begin :]
        self.parents = halves[:num_logits]
        batch.input_ids.index_copy_(
            0, self._words[begin + num_small : begin + num_small + num_nodes], halves[tokens_at:shift_at]
        )
        if self.has_branches:
            self._shift = halves[shift_at : shift_at + num_rows]
        if self.by_ancestors:
            self._is_dirty = True
        else:
            self.set_plain()  # chains attend causally, which any kernel can do

    def set_drafted(self, batch: InputBatch, drafted: torch.Tensor) -> None:
        """The step's drafts are those that the device has.

        Args:
            drafted: [rows of requests, 3, most drafts] int32 tokens (-1: none, and vLLM put that into the inputs),
                parents, and what is of no interest here.
        """
        if self._shifts is None:
            self._shifts = torch.zeros(len(self.ancestors), dtype=torch.int32, device=self.device)
        parents, draft_ids = torch.empty(2, len(batch.logits_indices), dtype=torch.int32, device=self.device)
        if self.has_branches:
            # those of padding as well
            self.num_nodes.zero_()
        lay_out(
            drafted, batch.idx_mapping, batch.cu_num_logits, batch.query_start_loc, batch.input_ids,
            parents, draft_ids, self.num_nodes, self.ancestors, self._shifts, has_branches=self.has_branches,
        )  # fmt: skip
        self.parents, self.draft_ids, self.by_ancestors = parents, draft_ids, self.has_branches
        if self.has_branches:
            self._shift = self._shifts[: batch.num_tokens]

    def shift_positions(self, positions: torch.Tensor) -> None:
        """Rewrite positions [..., rows] in place: those of nodes follow their depth, not their place in the order."""
        if self._shift is not None:
            positions[..., : len(self._shift)] += self._shift


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


def fill(emptied: SchedulerOutput, trees: TreeBatch) -> None:
    """Put a step's drafts into its schedule, in place."""
    for request_id, own in zip(trees.request_ids, token_lists(trees), strict=True):
        if own:
            emptied.num_scheduled_tokens[request_id] += len(own)
            emptied.scheduled_spec_decode_tokens[request_id] = own
    emptied.total_num_scheduled_tokens += trees.num_nodes


def _even(words: int) -> int:
    return words + (words & 1)
