"""The V1 model runner on CPU with exact tree verification.

What belongs here: the places where vLLM's step is entered, in the order of the step. How a tree is laid out is in
attention.py, how it is sampled in sampler.py, where drafts come from in drafting.py. vLLM's runner never learns that it
speculates (`speculative_config` stays None but for one call), so none of its own drafting code runs.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_specrollout import drafters
from vllm_specrollout.commit.plan import plan as plan_commit
from vllm_specrollout.policies.presets import make_policy
from vllm_specrollout.step import Speculation
from vllm_specrollout.types import RequestView, Shape, StepTiming
from vllm_specrollout.worker.common import SpecRolloutOutput, config_of, is_first_rank
from vllm_specrollout.worker.endings import endings_of
from vllm_specrollout.worker.policy_version import PolicyVersion
from vllm_specrollout.worker.stats import Stats
from vllm_specrollout.worker.v1.attention import PathAttention, PathStep, path_metadata, plan_paths
from vllm_specrollout.worker.v1.drafting import Drafting, StepDrafts
from vllm_specrollout.worker.v1.kv import BlockCopier, kv_shape, with_scratch
from vllm_specrollout.worker.v1.processors import are_builtin
from vllm_specrollout.worker.v1.requests import RequestBook, node_seeds
from vllm_specrollout.worker.v1.sampler import (
    Drafts,
    Sampled,
    TapeTopKTopPSampler,
    chain_depths,
    row_layout,
    sample_drafts,
)

logger = init_logger(__name__)


class SpecRolloutCPURunner(CPUModelRunner):
    """Stock CPU runner; drafts ride on its outputs, trees through its attention, the tape through its sampler."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = config_of(vllm_config)
        self.sampler.topk_topp_sampler = TapeTopKTopPSampler(self.sampler.logprobs_mode)
        self.speculation = Speculation(drafters.build(config) if is_first_rank() else [], make_policy(config))
        self.policy_version = PolicyVersion()
        self.num_scratch = 0  # set by the worker once the memory is known
        self.stats = Stats()
        self.paths = PathStep()
        self.book = RequestBook(Shape.OFF)
        self.shape: tuple[Shape, str] = (Shape.OFF, "the KV cache is not set up yet")
        self._step_drafts: StepDrafts | None = None
        self._path_inputs: dict[str, Any] | None = None
        self._sampled: Sampled | None = None
        self._branches = 0
        self._begin = 0.0
        self._verify_ms = 0.0
        self._timing: StepTiming | None = None  # of the last completed step

    # --- set-up ------------------------------------------------------------------------------------------------------

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        larger, scratch = with_scratch(kv_cache_config, 0 if is_profiling else self.num_scratch)
        super().initialize_kv_cache(larger, is_profiling=is_profiling, **kwargs)
        if is_profiling:
            return
        self.scratch = scratch
        self.shape = self._model_shape()
        self.book = RequestBook(self.shape[0])
        block_size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size if self.kv_caches else 1
        # the first scratch block is never written: branches start from its zeros
        self.drafting = Drafting(self.speculation, max(len(scratch) - 1, 0), block_size)
        if self.shape[0] is Shape.TREE:
            self.copier = BlockCopier(self.kv_caches)
            layers = self.compilation_config.static_forward_context
            for name in self.kv_cache_config.kv_cache_groups[0].layer_names:
                layers[name].impl = PathAttention(layers[name].impl, self.paths)
        if self.shape[0] is not Shape.TREE:
            effect = "off" if self.shape[0] is Shape.OFF else "chains only"
            logger.warning("Spec rollout: drafts are %s for this model: %s", effect, self.shape[1])

    def _model_shape(self) -> tuple[Shape, str]:
        if self.model_config.is_encoder_decoder or self.supports_mm_inputs or self.uses_mrope:
            return Shape.OFF, "encoder-decoder or multimodal model"
        if not are_builtin(self.input_batch.logitsprocs):
            return Shape.OFF, "custom logits processors may keep state that a draft would disturb"
        shape, reason = kv_shape(self.kv_cache_config, self.attn_groups, len(self.scratch))
        if shape is Shape.TREE and self.shared_kv_cache_layers:
            return Shape.CHAIN, "layers share their KV cache"
        if shape is Shape.TREE and config_of(self.vllm_config).shape == "chain":
            return Shape.CHAIN, '`shape` is "chain"'
        return shape, reason

    def _on_request_state_removed(self, req_id: str, req_state: CachedRequestState | None) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.book.forget(req_id)
        self.drafting.forget(req_id)

    # --- before the forward pass -------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        if self._timing is not None:
            # From one step's beginning to the next: the engine's own work counts. A long gap means it had none.
            period_ms = (now - self._begin) * 1e3
            own_ms = self._timing.step_ms
            if period_ms < 2.0 * own_ms + 5.0:
                self._timing = dataclasses.replace(self._timing, step_ms=period_ms)
        self._begin = now
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for req_id, (num_tokens, status) in endings_of(scheduler_output).items():
            if req_id in self.requests:
                entry = self.book.get(self.requests[req_id])
                self.speculation.finish(entry.ending(num_tokens, status, self.policy_version.current()))
        result = super()._update_states(scheduler_output)
        # The tapes own the generators. (vLLM 0.32 also rewinds those it finds here after a prefill chunk, which a CPU
        # generator cannot do: stock CPU engines stop with an error when a seeded prompt is prefilled in chunks.)
        self.input_batch.generators.clear()
        return result

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        self._step_drafts = self._sampled = self.paths.plan = None
        self._branches = 0
        if not scheduled:
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.speculative_config = True  # only asked whether it is None: makes logits rows for the draft tokens
        try:
            result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = None
        begin = time.perf_counter()
        self._step_drafts = self.drafting.scheduled(self.input_batch.req_ids, scheduled)
        if self._step_drafts.has_branches:
            self._lay_out(self._step_drafts)
        self.stats.layout_ms += (time.perf_counter() - begin) * 1e3
        return result

    def _lay_out(self, drafts: StepDrafts) -> None:
        """Positions of the nodes, paths, and the blocks that branches start from."""
        batch, n = self.input_batch, self.input_batch.num_reqs
        plan, raw = plan_paths(
            self.query_start_loc.np[: n + 1],
            batch.num_computed_tokens_cpu[:n],
            drafts.node_start,
            drafts.parents,
            batch.block_table[0].get_numpy_array(),
            self.drafting.block_size,
            self.scratch[1:],
            int(self.scratch[0]),
        )
        self.positions.numpy()[plan.node_rows] = plan.node_positions
        self.paths.plan, self._path_inputs = plan, raw
        self._branches = len(raw["seq_lens"]) - n

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

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = super()._model_forward(*args, **kwargs)
        self.stats.forward_ms += (time.perf_counter() - begin) * 1e3
        return result

    # --- after the forward pass --------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        n = self.input_batch.num_reqs
        entries = [self.book.get(self.requests[req_id]) for req_id in self.input_batch.req_ids]
        metadata = self.input_batch.sampling_metadata
        sampler: TapeTopKTopPSampler = self.sampler.topk_topp_sampler
        drafts = self._step_drafts
        if drafts is None:
            if not metadata.all_greedy:
                seeds = [0 if e.tape is None else e.tape.peek(1)[0] for e in entries]
                sampler.seeds = torch.tensor(seeds, dtype=torch.int64)
            output, kept = self.sampler(logits=logits, sampling_metadata=metadata), np.ones(n, dtype=np.int32)
        else:
            depths = self.paths.plan.depths if self.paths.plan is not None else chain_depths(drafts.node_start)
            nodes = Drafts(drafts.node_start, drafts.parents, drafts.token_ids, depths)
            row_request, row_depth = row_layout(nodes)
            if not metadata.all_greedy:
                sampler.seeds = torch.from_numpy(node_seeds(entries, drafts.node_start, row_depth))
            self._sampled = sample_drafts(self.sampler, logits, metadata, nodes, row_request, row_depth)
            self._commit(self._sampled, drafts)
            output, kept = self._sampled.output, self._sampled.num_accepted + 1
        sampler.seeds = None
        for entry, count, is_discarded in zip(entries, kept.tolist(), self.discard_request_mask.np[:n], strict=True):
            if entry.tape is not None and not is_discarded:
                entry.tape.advance(count)
        self._verify_ms = (time.perf_counter() - self._begin) * 1e3
        return output

    def _commit(self, sampled: Sampled, drafts: StepDrafts) -> None:
        """Bring the accepted paths' keys and values into the requests' own blocks."""
        plan = self.paths.plan
        self.paths.plan = None
        if plan is None:
            return
        ends = np.cumsum(sampled.num_accepted)
        last = np.where(sampled.num_accepted > 0, sampled.accepted[ends - 1] if len(sampled.accepted) else 0, 0)
        paths = plan.node_path[np.minimum(drafts.node_start[:-1] + last, len(plan.node_path) - 1)]
        moves = plan_commit(
            sampled.num_accepted,
            paths,
            plan.first_path,
            plan.root,
            plan.tables,
            self.input_batch.block_table[0].get_numpy_array(),
            self.drafting.block_size,
        )
        self.copier.copy(moves.source_blocks, moves.target_blocks)
        self.stats.branches_committed += int(((sampled.num_accepted > 0) & (paths != plan.first_path)).sum())

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if not isinstance(output, ModelRunnerOutput) or not output.sampled_token_ids:
            return output
        sampled, drafts = self._sampled, self._step_drafts
        draft_ms = 0.0
        if self.shape[0] is not Shape.OFF:
            self.drafting.settle(
                output.req_ids,
                drafts,
                sampled.num_accepted if sampled else None,
                sampled.accepted if sampled else None,
                self._timing,
            )
            views = self._views(output)
            if views:
                tokens, draft_ms = self.drafting.prepare(views, self.parallel_config.tensor_parallel_size)
                if tokens.req_ids:
                    output = SpecRolloutOutput.carrying(output, tokens)
        self._timing = self._account(output, draft_ms)
        return output

    def _views(self, output: ModelRunnerOutput) -> list[RequestView]:
        """The requests that may be drafted for, as they stand after this step."""
        batch, views = self.input_batch, []
        version = self.policy_version.current()
        for i, (req_id, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if not tokens:
                continue  # still in its prompt
            entry = self.book.get(self.requests[req_id])
            if entry.admission.shape is not Shape.OFF:
                tokens_so_far = batch.token_ids_cpu[i, : int(batch.num_tokens_no_spec[i])]
                views.append(entry.view(tokens_so_far, int(batch.num_prompt_tokens[i]), self.max_model_len, version))
        return views

    def _account(self, output: ModelRunnerOutput, draft_ms: float) -> StepTiming:
        """Add the step to the totals; returns what is known of its cost so far."""
        stats, drafts = self.stats, self._step_drafts
        rows, batch = int(self.query_start_loc.np[self.input_batch.num_reqs]), len(output.req_ids)
        nodes = len(drafts.parents) if drafts is not None else 0
        tokens = sum(map(len, output.sampled_token_ids))
        stats.steps += 1
        stats.request_steps += batch
        stats.output_tokens += tokens
        stats.step_ms += self._verify_ms
        stats.draft_ms += draft_ms
        if self._sampled is not None:
            stats.steps_with_drafts += 1
            stats.drafted += nodes
            stats.accepted += int(self._sampled.num_accepted.sum())
        is_decode_only = rows - nodes == batch
        if is_decode_only:
            entry = stats.by_rows.setdefault(rows, [0, 0.0])
            entry[0] += 1
            entry[1] += self._verify_ms
        return StepTiming(batch, rows, nodes, self._branches, tokens, self._verify_ms + draft_ms, is_decode_only)
