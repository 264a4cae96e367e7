"""Tree attention by path expansion over the stock kernel: see csrc/core/layout.h and docs/concepts/trees.md.

A layer's stock implementation is wrapped, not replaced: it computes every number. The wrapper only chooses which rows
form which sequence, and where keys and values are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_specrollout import _core
from vllm_specrollout.types import IntArray


@dataclass(slots=True)
class PathPlan:
    """One step's batch laid out as paths. Rows are batch rows; P paths."""

    # [rows] batch row of each query, path after path; None: the batch's own order
    query_rows: torch.Tensor | None
    # [rows] place of each batch row among the queries
    inverse: torch.Tensor
    # [writes] batch row and cache slot of each key and value to be written
    write_rows: torch.Tensor
    write_slots: torch.Tensor
    # [nodes] first path that holds each node; depth, 1 below the root; batch row; position in the sequence
    node_path: IntArray
    depths: IntArray
    node_rows: IntArray
    node_positions: IntArray
    # [R] first path and root position of each request
    first_path: IntArray
    root: IntArray
    # [P, width] block table of each path
    tables: IntArray


@dataclass(slots=True)
class PathStep:
    """Shared by all layers: the plan of the step in progress, or None when the stock view of the batch will do."""

    plan: PathPlan | None = None


class PathAttention:
    """Stands in for one layer's stock attention implementation."""

    def __init__(self, impl: Any, step: PathStep) -> None:
        self.impl = impl
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        plan = self.step.plan
        if plan is None or attn_metadata is None or plan.query_rows is None:
            return self.impl.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        by_path = query.index_select(0, plan.query_rows)
        path_output = torch.empty_like(by_path)
        self.impl.forward(layer, by_path, key, value, kv_cache, attn_metadata, path_output, *args, **kwargs)
        rows = len(plan.query_rows)
        torch.index_select(path_output, 0, plan.inverse, out=output[:rows].view(path_output.shape))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        plan = self.step.plan
        if plan is None:
            return self.impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        key, value = key.index_select(0, plan.write_rows), value.index_select(0, plan.write_rows)
        return self.impl.do_kv_cache_update(layer, key, value, kv_cache, plan.write_slots)


def plan_paths(
    row_start: IntArray,
    base: IntArray,
    node_start: IntArray,
    parents: IntArray,
    block_table: IntArray,
    block_size: int,
    scratch: IntArray,
    zero_block: int,
) -> tuple[PathPlan, dict[str, Any]]:
    """Lay the batch out; also returns what the metadata needs. Arguments as in csrc/core/layout.h."""
    raw = _core.expand_paths(row_start, base, node_start, parents, block_table, block_size, scratch, zero_block)
    plan = PathPlan(
        None if raw["is_in_order"] else torch.from_numpy(raw["query_rows"]),
        torch.from_numpy(raw["inverse"]),
        torch.from_numpy(raw["write_rows"]),
        torch.from_numpy(raw["write_slots"]),
        raw["node_path"],
        raw["depths"],
        raw["node_rows"],
        raw["node_positions"],
        raw["first_path"],
        raw["root"],
        raw["tables"],
    )
    return plan, raw


def rows_apart(raw: dict[str, Any], node_start: IntArray) -> dict[str, Any]:
    """Each row of a request with drafts as a sequence of its own, which attends to what the path holds before it.

    Args:
        raw: as `plan_paths` returns it.
        node_start: [R + 1] as in csrc/core/layout.h.
    """
    counts, first = np.diff(raw["query_start"]), raw["first_path"]
    owners = np.repeat(np.arange(len(first)), np.diff(first, append=len(counts)))
    is_split = (np.diff(node_start) > 0)[owners]
    pieces = np.where(is_split, counts, 1)
    paths = np.repeat(np.arange(len(counts)), pieces)
    place = np.arange(len(paths)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    behind = np.where(is_split[paths], counts[paths] - 1 - place, 0)
    rows = np.where(is_split, 1, counts)[paths]
    return {
        **raw,
        "query_start": np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        "seq_lens": (raw["seq_lens"][paths] - behind).astype(np.int32),
        "tables": raw["tables"][paths],
    }


def path_metadata(raw: dict[str, Any], builder: AttentionMetadataBuilder[Any]) -> Any:
    """Attention metadata of the paths: the stock builder's, over sequences that are paths."""
    starts = torch.from_numpy(raw["query_start"])
    return builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(raw["seq_lens"]),
            num_reqs=len(raw["seq_lens"]),
            num_actual_tokens=len(raw["query_rows"]),
            max_query_len=int(np.diff(raw["query_start"]).max()),
            max_seq_len=int(raw["seq_lens"].max()),
            block_table_tensor=torch.from_numpy(raw["tables"]),
            slot_mapping=torch.from_numpy(raw["write_slots"]),
            causal=True,
        ),
    )


class BlockCopier:
    """Copies whole blocks in every layer."""

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        unique = {kv.data_ptr(): kv for kv in kv_caches}
        self._bases = np.asarray(list(unique), dtype=np.uint64)
        self._strides = np.asarray([kv.stride(0) * kv.element_size() for kv in unique.values()], dtype=np.int64)
        assert all(kv[0].is_contiguous() for kv in unique.values()), "a block must be one run of memory"

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Overwrite blocks `targets` with blocks `sources`, [C] each."""
        if len(sources):
            _core.copy_blocks(self._bases, self._strides, sources.astype(np.int64), targets.astype(np.int64))
