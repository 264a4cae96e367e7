"""The V2 model runner with exact tree verification, whoever drafts.

What belongs here: the places where vLLM's step is entered, in the order of the step. Who drafts is in lane.py, what the
host knows in host.py, how a tree's rows are laid out in inputs.py, how they are attended to in attention.py, and how
they are sampled in verify.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_specrollout.errors import logger
from vllm_specrollout.speculator import Speculator
from vllm_specrollout.types import Answer, DraftMode, empty_trees
from vllm_specrollout.worker.arriving import is_unseeded, resumed_of, signed
from vllm_specrollout.worker.common import Stats, config_of
from vllm_specrollout.worker.drafting import Drafting, begin_step
from vllm_specrollout.worker.hidden import Tap
from vllm_specrollout.worker.models.swapping import Swapper
from vllm_specrollout.worker.request import Admissions
from vllm_specrollout.worker.scheduler import (
    DraftReport,
    SpecRolloutOutput,
    endings_of,
    judged_of,
    step_of,
    waiting_of,
    wanted_of,
)
from vllm_specrollout.worker.speculate import announce, make_speculator
from vllm_specrollout.worker.v2.attention import install_tree_attention
from vllm_specrollout.worker.v2.commit import RoutedExperts, SlotMover
from vllm_specrollout.worker.v2.device_drafts import DeviceDrafts
from vllm_specrollout.worker.v2.graphs import DraftGraphs
from vllm_specrollout.worker.v2.host import Host, HostRequest, InFlight, StepState, tokens_of
from vllm_specrollout.worker.v2.inputs import TreeInputs, follow_depths
from vllm_specrollout.worker.v2.scheduler import with_masks_for_drafts
from vllm_specrollout.worker.v2.shape import model_shape, one_line_reason
from vllm_specrollout.worker.v2.verify import TreeVerifier
from vllm_specrollout.worker.weights_version import WeightsVersion

MOST_IN_FLIGHT = 64

_Base = GPUModelRunner if TYPE_CHECKING else object


class SpecRolloutV2(_Base):
    """Mixed into vLLM's V2 runners: drafts at the last moment, verifies trees, moves what was accepted."""

    # a model that drafts, if any (models/drafter.py); the `DecoupledDrafter`, if any (worker.py)
    model_drafter: Any = None
    drafts: DeviceDrafts
    remote: Any = None
    # what its self-check found, as plain values; None: it was not checked yet
    self_check: dict[str, Any] | None = None
    # for a trainer; None: nobody asked
    tap: Tap | None = None
    # called before a step that computes; None: nobody has memory to give back
    before_step: Callable[[], object] | None = None
    # other weights for the model that drafts; None: there were none so far
    swapper: Swapper | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.spec_config = config_of(vllm_config)
        self.max_draft_tokens = self.num_speculative_steps
        self.spec_rollout, self.metrics = make_speculator(vllm_config, "v2")
        is_checking = self.spec_config.self_check != "off"
        drafting = Drafting.of(self.spec_rollout, self.parallel_config, is_checking=is_checking)
        self.host = Host(drafting, self.max_model_len)
        self.inputs = TreeInputs(self.max_num_reqs, self.max_num_tokens, device)
        self.tokens_ready = torch.cuda.Event()
        self.stats = Stats()
        self.admissions = Admissions(DraftMode.OFF)
        self.shape: tuple[DraftMode, str] = (DraftMode.OFF, "the KV cache is not set up yet")
        self.mover: SlotMover | None = None
        self.experts: RoutedExperts | None = None
        self.step = StepState()
        self._told: tuple[Any, ...] = ()
        self.draft_graphs = DraftGraphs()

    @property
    def drafting(self) -> Drafting:
        return self.host.drafting

    @property
    def weights_version(self) -> WeightsVersion:
        return self.host.weights_version

    def unfinished(self) -> list[Answer]:
        return self.host.unfinished()

    def standing(self) -> dict[str, tuple[int, int]]:
        return self.host.standing()

    @property
    def drafter(self) -> Speculator:
        """The name under which trainers look for it."""
        return self.spec_rollout

    # --- set-up ------------------------------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.structured_outputs_worker = with_masks_for_drafts(self)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling=is_profiling, **kwargs)
        if is_profiling:
            return
        self.shape = model_shape(self)
        self.admissions = Admissions(self.shape[0])
        announce(self.vllm_config, "V2", self.shape)
        self.verifier = TreeVerifier(self.sampler, self.max_draft_tokens)
        if (connector := getattr(self, "aux_output_connector", None)) is not None:
            self.experts = RoutedExperts(connector)
        if self.shape[0] is DraftMode.TREE:
            # a model that drafts writes what was accepted where it belongs by itself
            layers, names = self.compilation_config.static_forward_context, self.draft_layers
            apart = {layers[name].kv_cache.data_ptr() for name in names}
            self.mover = SlotMover([cache for cache in self.kv_caches if cache.data_ptr() not in apart])
            install_tree_attention(self)
            if (rope := getattr(self.model_state, "rope_state", None)) is not None:
                follow_depths(rope, self.inputs)
        else:
            effect = "off" if self.shape[0] is DraftMode.OFF else "chains only"
            logger.warning("Spec rollout: drafts are %s for this model: %s", effect, self.shape[1])

    @property
    def draft_layers(self) -> set[str]:
        """Names of the attention layers of a model that drafts."""
        return getattr(self.speculator, "draft_attn_layer_names", set())

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None and new.sampling_params.seed is not None:
                new.sampling_params.seed = signed(new.sampling_params.seed)
        super().add_requests(scheduler_output)
        unseeded = [new.req_id for new in scheduler_output.scheduled_new_reqs if is_unseeded(new.sampling_params)]
        if unseeded:
            # vLLM may sample them as it samples whoever has no seed, where nothing is drafted
            self.sampler.sampling_states.seeds_set[[self.req_states.req_id_to_index[name] for name in unseeded]] = False
        for new in scheduler_output.scheduled_new_reqs:
            params, tokens = new.sampling_params, new.prefill_token_ids
            assert params is not None and tokens is not None
            admission = self.admissions.admit(
                params,
                tokens[: new.prompt_len],
                has_prompt_embeds=new.prompt_embeds is not None,
                follows_one_line=one_line_reason(params),
                drafts_sessions=False,
                replays_traces=True,
            )
            is_resumed = new.req_id in resumed_of(scheduler_output)
            self.host.add(HostRequest(new.req_id, admission, new.prompt_len, tokens, params.temperature, is_resumed))

    def _remove_request(self, req_id: str) -> bool:
        self.host.leave(req_id, req_id in self.step.preempted)
        return super()._remove_request(req_id)

    # --- before the forward pass -------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        dummy_run = kwargs.get("dummy_run", False) or (len(args) > 1 and args[1])
        num_running = len(scheduler_output.num_scheduled_tokens)
        step = self.step = StepState(step_of(scheduler_output), num_running, waiting_of(scheduler_output))
        step.preempted = (scheduler_output.preempted_req_ids or set()) - scheduler_output.finished_req_ids
        step.wanted = wanted_of(scheduler_output)
        self.inputs.clear()
        if self.swapper is not None:
            self.swapper.begin_step(judged_of(scheduler_output))
        for req_id, (num_tokens, status) in endings_of(scheduler_output).items():
            self.host.end(req_id, num_tokens, status)
        with ExitStack() as self._during:
            if not dummy_run and scheduler_output.total_num_scheduled_tokens:
                if self.before_step is not None:
                    self.before_step()
                begin_step(self.weights_version, scheduler_output)
                # what watches is told; whether anything is drafted goes by what is asked when drafts are made
                self.drafting.is_paused(step.number, num_running)
                scheduler_output = self._begun(scheduler_output)
            output = super().execute_model(scheduler_output, *args, **kwargs)
        return output

    def _begun(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """A step begins that computes something; returns the schedule as vLLM is to see it."""
        raise NotImplementedError

    def _set_active_loras(self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        if self.step.has_drafts:
            # one entry per logits row; vLLM's has one per request
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, self.step.num_logits).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        self.inputs.slots = slot_mappings[0] if len(slot_mappings) else None
        # slots follow the rows' order, positions the nodes' depth
        self.inputs.shift_positions(input_batch.positions)
        return block_tables, slot_mappings

    # --- after the forward pass --------------------------------------------------------------------------------------

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        self.step.num_rows = input_batch.num_tokens
        if not self.step.has_drafts:
            return super().sample(hidden_states, input_batch, grammar_output)
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        if grammar_output is not None and logits.shape[0] > 0:
            self.structured_outputs_worker.apply_grammar_bitmask(
                logits, input_batch, grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            )
        output, path = self.verifier(logits, input_batch, self.inputs, self.drafts.withheld(input_batch))
        if self.inputs.has_branches:
            self.step.accepted = (input_batch.query_start_loc, path, output.num_sampled)
            if self.experts is not None:  # before vLLM takes them
                self.experts.keep(*self.step.accepted)
        return output, output.num_sampled, output.num_rejected

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        state = self.execute_model_state
        batch = state.input_batch if state is not None else None
        if self.step.wanted and self.tap is not None and batch is not None:
            with self.spec_rollout.guard.over("sending hidden states", "a trainer misses some"):
                self.tap.take(
                    self.step.wanted,
                    self.weights_version.number,
                    batch.req_ids,
                    batch.query_start_loc_np,
                    state.hidden_states,
                    state.aux_hidden_states,
                )
        output = super().sample_tokens(grammar_output)
        self._commit()
        if batch is None or output is None or self.shape[0] is DraftMode.OFF:
            return output
        self.tokens_ready.record(self.output_copy_stream)
        self._learn()
        self._remember(output, batch)
        report, counts = self._report(output), self.metrics.take_if_due()
        judged = None if self.swapper is None else self.swapper.verdict
        news = (report.asks_at, report.limits, report.most, judged)
        if news != self._told or self.step.has_drafts or counts:
            # in a pause there is nothing new
            self._told = news
            own = output.model_runner_output
            output.model_runner_output = SpecRolloutOutput.carrying(own, None, report, counts, judged)
        return output

    def _commit(self) -> None:
        """Bring what was accepted of a step's trees together, if it had any and that was not done yet: before anything
        reads the KV cache, but behind the tokens that the host waits for."""
        if self.step.accepted is not None:
            assert self.mover is not None and self.inputs.slots is not None
            self.mover.move(self.inputs.slots, *self.step.accepted)
            self.step.accepted = None

    def _remember(self, output: Any, batch: InputBatch) -> None:
        """Note the step as in flight; nobody waits for it before drafts need its tokens."""
        step = self.step
        self.stats.steps += 1
        self.stats.request_steps += batch.num_reqs
        self.host.sent(
            InFlight(
                [self.host.get(request_id) for request_id in batch.req_ids],
                empty_trees(batch.req_ids),
                step.number,
                tokens_of(output, self.tokens_ready),
                step.num_rows,
                step.num_rows - batch.num_draft_tokens == batch.num_reqs,
                waiting=step.waiting,
                withheld=step.withheld,
                weights_version=self.weights_version.number,
                drafted=step.drafted,
                # where the host is the device, they are there at once
                is_home=getattr(self.tokens_ready, "query", lambda: True),
            )
        )
        self.tokens_ready = torch.cuda.Event()
        if self.host.num_in_flight > MOST_IN_FLIGHT:
            # nobody drafts: keep the mirror from falling ever further behind (all but the last of these are long done)
            self.settle(keep=2)

    def settle(self, keep: int = 0) -> None:
        """Take in the steps in flight, but for the last `keep`, and learn from them."""
        self.take_in(keep)
        self._learn()

    def take_in(self, keep: int = 0) -> None:
        """`settle` without what can wait until the next step is launched."""
        settled = self.host.settle(keep)
        self.stats.output_tokens += settled.tokens
        self.stats.accepted += settled.accepted
        self.stats.drafted += settled.drafted
        self.stats.steps_with_drafts += settled.drafting
        self.stats.branches_committed += settled.branching

    def _learn(self) -> None:
        for timing in self.host.learn():
            self.stats.step_ms += timing.step_ms

    def _report(self, output: Any) -> DraftReport:
        """What the scheduler is told beside the step's output."""
        raise NotImplementedError
