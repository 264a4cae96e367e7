"""Inputs of one step's drafts on the device: one packed copy from the host, nothing read back.

Rows are those of the forward pass, in batch order; a drafting request's rows are its last known token (the root) and
its nodes. Buffers that the attention kernel reads live as long as the engine, so that a captured graph finds them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.trees.batch import token_lists, with_branches
from vllm_specrollout.trees.mask import ancestor_masks
from vllm_specrollout.types import TreeBatch


class TreeInputs:
    """The step's trees on the device."""

    def __init__(self, max_reqs: int, max_rows: int, max_draft_tokens: int, device: torch.device) -> None:
        self.device = device
        self.max_draft_tokens = max_draft_tokens
        # [max_reqs] nodes of each request of the batch, in batch order; 0: rows attend causally
        self.num_nodes = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        # [max_rows] bit j: node j of the row's request is the row's node or above it
        self.ancestors = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # [logits rows] each row's parent, counted from its request's root row; -1 for the root
        self.parents: torch.Tensor | None = None
        # [num_groups' first, rows] KV slots, set when they are known
        self.slots: torch.Tensor | None = None
        # some request of the step has a tree, not a chain; known before the step's graph is chosen
        self.has_branches = False
        # rows attend by ancestors: where there are branches, and while the graphs of such steps are captured
        self.by_ancestors = False
        self.always_by_ancestors = False
        self._shift: torch.Tensor | None = None
        self._is_dirty = False

    def clear(self) -> None:
        self.parents = self.slots = self._shift = None
        self.has_branches = self.by_ancestors = False

    def expect(self, trees: TreeBatch) -> None:
        """These are the step's drafts."""
        self.has_branches = bool(with_branches(trees).any())

    def write_tokens(self, trees: TreeBatch, index_of: Mapping[str, int], draft_tokens: torch.Tensor) -> None:
        """Put the drafts where vLLM fetches draft tokens from, `draft_tokens [max_reqs, max_draft_tokens]`."""
        sizes = trees.sizes
        with_draft = np.flatnonzero(sizes)
        width = int(sizes.max())
        packed = np.zeros((len(with_draft), width + 1), dtype=np.int64)
        packed[:, 0] = [index_of[trees.request_ids[i]] for i in with_draft.tolist()]
        kept = sizes[with_draft]
        row = np.repeat(np.arange(len(with_draft)), kept)
        packed[row, 1 + np.arange(trees.num_nodes) - np.repeat(trees.node_start[with_draft], kept)] = trees.token_ids
        on_device = async_tensor_h2d(packed, device=self.device)
        draft_tokens[:, :width].index_copy_(0, on_device[:, 0], on_device[:, 1:])

    def set_plain(self) -> None:
        """No drafts in this step, or none that the attention kernel must know."""
        if self._is_dirty:
            self.num_nodes.zero_()
            self._is_dirty = False

    def set_trees(self, batch: InputBatch, trees: TreeBatch) -> None:
        """Lay the trees of the step out over its rows.

        Args:
            trees: over the batch's requests, in its order.
        """
        num_logits, num_rows = int(batch.cu_num_logits_np[-1]), batch.num_tokens
        num_reqs = batch.num_reqs_after_padding
        # what kernels want in 32 bits stands first, where it is aligned for them
        num_small = -(-(num_logits + num_reqs) // 2)
        packed = np.zeros(num_small + 2 * num_rows, dtype=np.int64)
        small = packed[:num_small].view(np.int32)
        parents, num_nodes = small[:num_logits], small[num_logits : num_logits + num_reqs]
        ancestors, shift = packed[num_small : num_small + num_rows], packed[num_small + num_rows :]
        parents[:] = -1
        sizes, ends, nodes = trees.sizes, trees.node_start[1:], np.arange(trees.num_nodes)
        num_nodes[: len(sizes)] = sizes
        # a request's nodes are the last of its logits rows, and of its rows
        logits_rows = nodes + np.repeat(batch.cu_num_logits_np[1 : len(sizes) + 1] - ends, sizes)
        rows = nodes + np.repeat(batch.query_start_loc_np[1 : len(sizes) + 1] - ends, sizes)
        parents[logits_rows] = trees.parents + 1
        ancestors[rows] = ancestor_masks(trees).view(np.int64)
        shift[rows] = trees.depth - 1 - (nodes - np.repeat(trees.node_start[:-1], sizes))
        on_device = async_tensor_h2d(packed, device=self.device)
        small_on_device = on_device[:num_small].view(torch.int32)
        self.parents = small_on_device[:num_logits]
        self.by_ancestors = self.has_branches or self.always_by_ancestors
        if self.has_branches:
            self._shift = on_device[num_small + num_rows :]
        if self.by_ancestors:
            self.ancestors[:num_rows].copy_(on_device[num_small : num_small + num_rows])
            self.num_nodes[:num_reqs].copy_(small_on_device[num_logits : num_logits + num_reqs])
            self._is_dirty = True
        else:
            self.set_plain()  # chains attend causally, which any kernel can do

    def shift_positions(self, positions: torch.Tensor) -> None:
        """Rewrite positions in place: those of nodes follow their depth, not their place in the tree's order."""
        if self._shift is not None:
            positions[: len(self._shift)] += self._shift


def holds_prompt(scheduler_output: SchedulerOutput) -> bool:
    """Whether some request computes more than its last token and its room: a piece of a prompt."""
    room = scheduler_output.scheduled_spec_decode_tokens
    return any(
        rows > 1 + len(room.get(request_id, ())) for request_id, rows in scheduler_output.num_scheduled_tokens.items()
    )


def filled(scheduler_output: SchedulerOutput, trees: TreeBatch) -> SchedulerOutput:
    """A copy of a step's schedule in which placeholders have become drafts, and those left over are gone."""
    step = copy.copy(scheduler_output)
    step.num_scheduled_tokens = dict(scheduler_output.num_scheduled_tokens)
    step.scheduled_spec_decode_tokens = {}
    drafted = dict(zip(trees.request_ids, token_lists(trees), strict=True))
    for request_id, placeholders in scheduler_output.scheduled_spec_decode_tokens.items():
        own = drafted.get(request_id, [])
        step.num_scheduled_tokens[request_id] -= len(placeholders) - len(own)
        if own:
            step.scheduled_spec_decode_tokens[request_id] = own
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    return step
