"""The V1 model runner's branches.

What belongs here: how they get through the step on CPU. What chains need as well is in runner.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_specrollout import _core
from vllm_specrollout.trees.batch import as_chains
from vllm_specrollout.trees.kv_moves import plan_moves
from vllm_specrollout.types import DraftMode, RequestBatch, TreeBatch
from vllm_specrollout.worker.common import CHAIN_ASKED, config_of
from vllm_specrollout.worker.rows import RowsAlike
from vllm_specrollout.worker.v1.attention import (
    BlockCopier,
    PathAttention,
    PathStep,
    path_metadata,
    plan_paths,
    rows_apart,
)
from vllm_specrollout.worker.v1.kv import kv_shape, with_scratch
from vllm_specrollout.worker.v1.runner import SpecRolloutV1
from vllm_specrollout.worker.v1.sampler import Sampled, fewer


class SpecRolloutCPURunner(SpecRolloutV1, CPUModelRunner):
    """Stock CPU runner; trees go through its attention as paths."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.num_scratch = 0  # set by the worker once the memory is known
        self.paths = PathStep()
        self._path_inputs: dict[str, Any] | None = None
        self.rows: RowsAlike | None = None  # set by the worker once the model is ready
        self._is_row_invariant = config_of(vllm_config).row_invariant

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        larger, scratch = with_scratch(kv_cache_config, 0 if is_profiling else self.num_scratch)
        super().initialize_kv_cache(larger, is_profiling=is_profiling, **kwargs)
        if is_profiling:
            return
        self.scratch = scratch
        self.block_size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size if self.kv_caches else 1
        self._set_up_drafting()
        if self.knows_paths:
            self.copier = BlockCopier(self.kv_caches)
            layers = self.compilation_config.static_forward_context
            for name in self.kv_cache_config.kv_cache_groups[0].layer_names:
                layers[name].impl = PathAttention(layers[name].impl, self.paths)

    @property
    def knows_paths(self) -> bool:
        """Whether steps can be laid out as paths: for branches, or for rows that attend one by one."""
        return self.shape[0] is DraftMode.TREE or self.shape == (DraftMode.CHAIN, CHAIN_ASKED)

    @property
    def lays_out_chains(self) -> bool:  # type: ignore[override]
        """Whether drafted rows are to attend one by one, as this host rounds several of them otherwise."""
        return self._is_row_invariant and self.knows_paths and self.rows is not None and not self.rows.attention

    def _kv_shape(self) -> tuple[DraftMode, str]:
        return kv_shape(self.kv_cache_config, self.attn_groups, len(self.scratch))

    def _fit(self, trees: TreeBatch, batch: RequestBatch) -> TreeBatch:
        """No more nodes than there may be noise for; chains where scratch would not suffice for the branches."""
        trees = fewer(trees, self.noise.most_nodes)
        roots = np.fromiter((len(view.token_ids) - 1 for view in batch.views), np.int32, batch.size)
        # the first scratch block is never written: branches start from its zeros
        free = max(len(self.scratch) - 1, 0)
        is_chain = _core.without_scratch(trees.node_start, trees.parents, roots, self.block_size, free)
        return as_chains(trees, is_chain) if is_chain.any() else trees

    # --- before the forward pass -------------------------------------------------------------------------------------

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        self.paths.plan = None
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)

    def _lay_out(self, trees: TreeBatch) -> None:
        """Positions of the nodes, paths, and the blocks that branches start from."""
        batch, n = self.input_batch, self.input_batch.num_reqs
        plan, raw = plan_paths(
            self.query_start_loc.np[: n + 1],
            batch.num_computed_tokens_cpu[:n],
            trees.node_start,
            trees.parents,
            batch.block_table[0].get_numpy_array(),
            self.block_size,
            self.scratch[1:],
            int(self.scratch[0]),
        )
        if self.lays_out_chains:
            raw = rows_apart(raw, trees.node_start)
        positions = self.positions.numpy()
        if self.uses_mrope:
            # behind a prompt all dimensions go on alike, each from where the prompt left it
            self.mrope_positions.cpu.numpy()[:, plan.node_rows] += plan.node_positions - positions[plan.node_rows]
        positions[plan.node_rows] = plan.node_positions
        self.paths.plan, self._path_inputs = plan, raw

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        raw, self._path_inputs = self._path_inputs, None
        if raw is None:
            return super()._build_attention_metadata(*args, **kwargs)
        begin = time.perf_counter()
        self.copier.copy(raw["copy_from"], raw["copy_to"])
        metadata: dict[str, Any] = {}
        for group in self.attn_groups[0]:
            metadata.update(dict.fromkeys(group.layer_names, path_metadata(raw, group.get_metadata_builder(0))))
        self.stats.layout_ms += (time.perf_counter() - begin) * 1e3
        return metadata, None

    # --- after the forward pass --------------------------------------------------------------------------------------

    def _commit(self, sampled: Sampled, trees: TreeBatch) -> None:
        """Bring the accepted paths' keys and values into the requests' own blocks."""
        plan = self.paths.plan
        self.paths.plan = None
        if plan is None:
            return
        ends = np.cumsum(sampled.num_accepted)
        last = np.where(sampled.num_accepted > 0, sampled.accepted[ends - 1] if len(sampled.accepted) else 0, 0)
        paths = plan.node_path[np.minimum(trees.node_start[:-1] + last, len(plan.node_path) - 1)]
        is_branch = (sampled.num_accepted > 0) & (paths != plan.first_path)
        if not is_branch.any():
            return
        moves = plan_moves(
            sampled.num_accepted,
            paths,
            plan.first_path,
            plan.root,
            plan.tables,
            self.input_batch.block_table[0].get_numpy_array(),
            self.block_size,
        )
        self.copier.copy(moves.source_blocks, moves.target_blocks)
        self.stats.branches_committed += int(is_branch.sum())
