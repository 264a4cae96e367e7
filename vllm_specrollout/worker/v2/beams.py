"""Passes of a head in which several nodes of each request go on: sequences of one request to vLLM's own speculator.

Each of a request's beams has a row of the block table that aliases the request's blocks. From the one on into which the
first drafted token falls, the row has scratch blocks of its own, of the head's own layers alone. When it is chosen anew
who goes on, those of the parent are copied. So any attention backend serves, and none needs to know of trees.

Scratch blocks are taken out of the scheduler's pool for good, the last ones that there are (`scratch_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from vllm_specrollout.drafters.beams import LEAST_NODES, WIDTHS, BeamTrees
from vllm_specrollout.patches import features
from vllm_specrollout.worker.common import HEADS, config_of, drafting_model, levels_of

MOST_ROWS = 64
"""Of a pass."""
SHARE = 16
"""Scratch is one of so many blocks at most, or there are no beams."""
_PAD = -1

Expand = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Hidden states [N, H] of rows, positions of what they draft [N], and rows of their requests [N] -> [N, C] each:
tokens, and their log probabilities."""


def levels_of_trees(vllm_config: VllmConfig) -> int:
    """Levels of the trees that a head drafts in the target's steps; 0: none does."""
    config = config_of(vllm_config)
    model = drafting_model(config)
    if model is None or config.shape == "chain" or model.get("method") not in HEADS:
        return 0
    return levels_of(vllm_config)


def blocks_each(levels: int, block_size: int) -> int:
    """Blocks into which the tokens of one beam may fall: all levels but the last one have keys and values."""
    return (levels - 2) // block_size + 2


def scratch_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many of the last blocks of the pool are scratch; 0: there are no beams here.

    Several ranks have none: one of them alone knows which tokens end a request.
    """
    levels, groups = levels_of_trees(vllm_config), kv_cache_config.kv_cache_groups
    requests, ranks = vllm_config.scheduler_config.max_num_seqs, vllm_config.parallel_config.world_size_across_dp
    is_wide = config_of(vllm_config).max_draft_tokens >= LEAST_NODES and requests >= WIDTHS[1]
    if levels < 2 or not is_wide or ranks > 1 or len(groups) != 1 or not features.installed().drafts_few:
        return 0
    count = min(MOST_ROWS, requests) * blocks_each(levels, groups[0].kv_cache_spec.block_size)
    return count if count * SHARE <= kv_cache_config.num_blocks else 0


class Beams:
    """Takes the place of the later passes of vLLM's speculator, where some step has beams.

    Args:
        of_vllm: its KV cache set up.
        caches: [blocks, ...] of the head's own layers.
        block_size: tokens of a block.
        levels: of a tree, at most.
        scratch: the blocks that are.
        expand: what a pass's rows draft.
    """

    def __init__(
        self, of_vllm: Any, caches: list[torch.Tensor], block_size: int, levels: int, scratch: range, expand: Expand
    ) -> None:
        self.of_vllm, self._caches, self._block_size, self._expand = of_vllm, caches, block_size, expand
        self._each = blocks_each(levels, block_size)
        self._scratch = torch.tensor(scratch, dtype=torch.int32).to(of_vllm.device)
        self.most_rows = len(scratch) // self._each
        self.trees: BeamTrees | None = None
        """Of the step in progress, as far as they have grown, begun with the first pass; None: it has no beams."""
        self.drafted: tuple[torch.Tensor, torch.Tensor] = torch.zeros(0), torch.zeros(0)
        """[batch, C] tokens of its first pass, and their log probabilities."""
        for name in ("_multi_step_decode", "_fused_multi_step_decode"):
            if hasattr(of_vllm, name):
                setattr(of_vllm, name, self._instead_of(getattr(of_vllm, name)))

    def _instead_of(self, stock: Callable[..., None]) -> Callable[..., None]:
        def decode(num_reqs: int, skip_attn: bool, desc: Any, across_dp: Any, bounds: Any, levels: int) -> None:
            if self.trees is None or skip_attn:
                stock(num_reqs, skip_attn, desc, across_dp, bounds, levels)
            else:
                self._decode(num_reqs, desc, bounds, levels)

        return decode

    def _decode(self, requests: int, desc: Any, bounds: torch.Tensor, levels: int) -> None:
        """All passes but the first one.

        Args:
            desc: the batch as vLLM would run it.
            bounds: [R] on the host, tokens of each request at most.
        """
        assert self.trees is not None
        spec, trees = self.of_vllm, self.trees
        buffers, rows = spec.input_buffers, requests * trees.beam
        owner = torch.arange(rows, device=spec.device) // trees.beam
        # of the first token that was drafted, which the first of these passes is fed with
        begin, keys = buffers.positions[:requests][owner].clone(), spec.sample_src_positions[:requests][owner].clone()
        lengths, indices = buffers.seq_lens[:requests][owner].clone(), spec.idx_mapping[:requests][owner].clone()
        hidden = spec.hidden_states[:requests, None].clone()
        blocks = self._aliased(begin, owner)
        last = spec.max_model_len - 1
        wide = replace(desc, cg_mode=CUDAGraphMode.NONE, num_tokens=rows, num_reqs=rows)
        bounds = bounds[:requests].repeat_interleave(trees.beam)
        spec.input_buffers.query_start_loc.copy_(
            torch.arange(len(buffers.query_start_loc), device=spec.device).clamp(max=rows)
        )
        parents, tokens = trees.add(*(one[:requests, None] for one in self.drafted))
        for level in range(1, levels):
            if level > 1:
                self._follow(parents)
            hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
            positions = (begin + level - 1).clamp(max=last)
            buffers.input_ids[:rows], buffers.positions[:rows] = tokens.flatten().to(buffers.input_ids.dtype), positions
            buffers.seq_lens[:rows] = (lengths + level - 1).clamp(max=last + 1)
            spec.hidden_states[:rows], spec.idx_mapping[:rows] = hidden, indices
            spec.current_draft_step.fill_(level)
            metadata, slots = self._laid_out(wide, rows, blocks, positions, bounds, level)
            found, hidden = spec._run_model(rows, metadata, slots, None, CUDAGraphMode.NONE)
            children, log_p = self._expand(found[:rows], keys + level - 1, indices)
            shape = requests, trees.beam, children.shape[1]
            parents, tokens = trees.add(children.view(shape), log_p.view(shape))
            hidden = hidden[:rows].view(requests, trees.beam, -1)

    def _aliased(self, begin: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """[rows, width] int32 block tables: the requests' own, and scratch from the first drafted token on."""
        table = self.of_vllm.block_tables.input_block_tables[0]
        blocks = table[owner].clone()
        first = (begin // self._block_size)[:, None]
        scratch = self._scratch[: len(owner) * self._each].view(len(owner), self._each)
        # what was verified of that block is in each beam's own
        for cache in self._caches:
            cache[scratch[:, 0].long()] = cache[blocks.gather(1, first)[:, 0].long()]
        place = torch.arange(table.shape[1], device=table.device) - first
        ours = scratch.gather(1, place.clamp(0, self._each - 1))
        return torch.where((place >= 0) & (place < self._each), ours, blocks)

    def _follow(self, parents: torch.Tensor) -> None:
        """Copy the scratch blocks of the parents.

        Args:
            parents: [R, K] which of its request's K beams each one goes on from.
        """
        requests, beam = parents.shape
        own = self._scratch[: requests * beam * self._each].view(requests, beam, self._each).long()
        theirs = own.gather(1, parents[..., None].expand(-1, -1, self._each)).flatten()
        for cache in self._caches:
            # indexed, so all are read before any is written
            cache[own.flatten()] = cache[theirs]

    def _laid_out(
        self, desc: Any, rows: int, blocks: torch.Tensor, positions: torch.Tensor, bounds: torch.Tensor, level: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What attention is told of a pass."""
        spec, size = self.of_vllm, self._block_size
        tables = spec.block_tables
        tables.input_block_tables[0][:rows] = blocks
        own = blocks.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
        tables.slot_mappings[0].fill_(_PAD)
        tables.slot_mappings[0, :rows] = own
        metadata = spec._build_uniform_attn_metadata(
            num_reqs=rows, batch_desc=desc, num_query_per_req=1, seq_lens_cpu_upper_bound=bounds, step=level
        )
        slots = build_slot_mappings_by_layer(tables.slot_mappings[:, :rows], spec.kv_cache_config)
        return metadata, slots
