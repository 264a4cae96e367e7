"""The V2 runner where a model drafts: vLLM's speculator made and loaded, and fed with what the target computed.

What belongs here: where vLLM's runner has to see its speculator, and where not. It sees it while models are loaded and
the KV cache is set up, so that the model gets its layers' room there; in a step it sees none, and decodes plainly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import DraftMode, IntArray, VerifyResult
from vllm_specrollout.worker.common import config_of, with_model
from vllm_specrollout.worker.model_drafter import ModelDrafter, tell
from vllm_specrollout.worker.proposing import Seat, check_layers
from vllm_specrollout.worker.ranks import Ranks
from vllm_specrollout.worker.v2.host import InFlight
from vllm_specrollout.worker.v2.proposer import CounterNoise, ProposerV2
from vllm_specrollout.worker.v2.runner import SpecRolloutV2
from vllm_specrollout.worker.waiting_rows import Rows, have_prompts, of_those_there, rows_that_hold


@dataclass(slots=True)
class Computed:
    """What the target computed in a step, on the device; copies, since vLLM's buffers belong to the next step."""

    # [R + 1] first row of each request
    query_start: IntArray
    # [R] tokens of each request that are computed after this step, if no draft was rejected
    lengths: np.ndarray
    # [rows] int32 tokens; int64 positions
    token_ids: torch.Tensor
    positions: torch.Tensor
    # [rows, width] as the model takes them
    hidden: torch.Tensor


class ModelledV2(SpecRolloutV2):
    """Mixed into vLLM's V2 runners where the configuration names a model that drafts."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = with_model(vllm_config)
        assert config.speculative_config is not None
        self.draft_model = init_speculator(config, device, self.req_states)
        if not isinstance(self.draft_model, (TargetDependentARSpeculator, StandaloneARSpeculator)):
            raise UnsupportedError(
                f"vLLM drafts with {type(self.draft_model).__name__} here, which cannot be asked level by level",
                "drop `--speculative-config`, or leave spec rollout off",
            )
        self.takes_layers = config.speculative_config.method == "eagle3"
        # vLLM's `ExecuteModelState` of the step that is sampled
        self._state: Any = None
        self.host.came_home = self._came_home

    # --- set-up ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _seen_by_vllm(self) -> Iterator[None]:
        self.speculator = self.draft_model
        try:
            yield
        finally:
            self.speculator = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._seen_by_vllm():
            super().load_model(*args, **kwargs)
        if self.takes_layers:
            set_eagle3_aux_hidden_state_layers(self.model, self.draft_model.speculative_config)
            self.use_aux_hidden_state_outputs = True

    def get_draft_model(self) -> Any:
        # vLLM keeps its buffers through a sleep
        return getattr(self.draft_model, "model", None)

    def get_kv_cache_spec(self) -> Any:
        with self._seen_by_vllm():
            return super().get_kv_cache_spec()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        with self._seen_by_vllm():
            super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if is_profiling or self.shape[0] is DraftMode.OFF:
            return
        check_layers(self, self.draft_model.draft_attn_layer_names)
        proposer, ranks = ProposerV2(self.draft_model), Ranks(self, self.host.drafting)
        source = len(config_of(self.vllm_config).drafters)
        self.model_drafter = ModelDrafter(proposer, CounterNoise(self.sampler), source, ranks)
        self.spec_rollout.replace_drafters([*self.spec_rollout.drafters, self.model_drafter])

    def _remove_request(self, req_id: str) -> bool:
        row = self.req_states.req_id_to_index.get(req_id)
        if row is not None:
            # drafts may reach beyond the next request's blocks, and must not find the last one's there
            for table in self.block_tables.block_tables:
                table.gpu[row].zero_()
        return super()._remove_request(req_id)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _with_drafts(self, scheduler_output: SchedulerOutput, is_paused: bool) -> SchedulerOutput:
        filled = super()._with_drafts(scheduler_output, is_paused)
        if self.model_drafter is not None and not is_paused:
            tell(self, lambda drafter: drafter.flush_if_due())
        return filled

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        self._state = self.execute_model_state
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._state = None

    def _computed(self, batch: InputBatch) -> Computed | None:
        kept: list[Computed] = []
        if self.model_drafter is not None:
            tell(self, lambda drafter: kept.append(self._copied(drafter, batch)))
        return kept[0] if kept else None

    def _copied(self, drafter: ModelDrafter, batch: InputBatch) -> Computed:
        assert isinstance(drafter.proposer, ProposerV2)
        rows, state = batch.num_tokens, self._state
        if drafter.proposer.is_model:
            hidden = torch.empty(rows, 0, device=self.device)
        elif self.takes_layers:
            hidden = torch.cat([layer[:rows] for layer in state.aux_hidden_states], dim=-1)
        else:
            hidden = get_drafter_hidden_states(self.model, state.hidden_states)[:rows].clone()
        return Computed(
            batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int32),
            batch.num_computed_tokens_np + batch.num_scheduled_tokens,
            batch.input_ids[:rows].clone(),
            batch.positions[:rows].clone(),
            hidden,
        )

    def _remember(self, output: Any, batch: InputBatch) -> None:
        super()._remember(output, batch)
        if self.model_drafter is not None and self.host.rows_in_flight > self.max_num_tokens:
            # copies of prompts would fill the device while nobody drafts
            self.settle(keep=1)

    def settle(self, keep: int = 0) -> None:
        super().settle(keep)
        drafter = self.model_drafter
        if drafter is None:
            return
        drafter.seats = {name: seat for name, seat in drafter.seats.items() if self.host.get(name) is seat.entry}
        if keep:
            # nobody drafts, and what waits must not grow for ever
            tell(self, lambda drafter: drafter.flush_if_due())

    def _came_home(self, step: InFlight, counts: IntArray, result: VerifyResult) -> None:
        """A step's tokens are known: so are the rows that hold.

        Args:
            counts: [R] tokens that were sampled for each request.
        """
        if self.model_drafter is not None and step.computed is not None:
            tell(self, lambda drafter: self._feed(drafter, step, counts, result))

    def _feed(self, drafter: ModelDrafter, step: InFlight, counts: IntArray, result: VerifyResult) -> None:
        computed: Computed = step.computed
        index, held = rows_that_hold(computed.query_start, step.trees, result)
        names: list[str | None] = []
        index_of = self.req_states.req_id_to_index
        for i, request in enumerate(step.requests):
            name = request.request_id if request is not None else ""
            if request is None or self.host.get(name) is not request or name not in index_of:
                names.append(None)  # it is gone
                continue
            # a prompt that is not over yet goes on with its own next token
            after = request.length - 1 if counts[i] else int(computed.lengths[i])
            drafter.seats[name] = Seat(request, index_of[name], 0, int(request.buffer[after]))
            # who never drafts is fed for the sake of those who share its prompt's blocks
            names.append(None if request.admission.shape is DraftMode.OFF and held[i] == 1 else name)
        has_prompt = have_prompts(computed.query_start, step.trees)
        prompts = [name for name, has in zip(names, has_prompt, strict=True) if has and name]
        names, held, index = of_those_there(names, held, index)
        rows = torch.from_numpy(index).to(self.device)
        columns = (computed.token_ids[rows], computed.positions[rows], computed.hidden[rows])
        drafter.feed(Rows(names, held, *columns), prompts)
