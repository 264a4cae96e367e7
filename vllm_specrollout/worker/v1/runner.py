"""The V1 model runner with exact verification of drafts: all of it but branches.

What belongs here: the places where vLLM's step is entered, in its order. Branches are laid out in cpu_runner.py, rows
sampled in sampler.py, noise kept in trees/tape.py, drafts made by drafting.py, speculator.py. vLLM knows of no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_specrollout.errors import logger
from vllm_specrollout.patches import features
from vllm_specrollout.trees.batch import num_branches, with_branches
from vllm_specrollout.types import (
    Answer,
    DraftMode,
    FinishReason,
    RequestBatch,
    StepTiming,
    TreeBatch,
    empty_trees,
)
from vllm_specrollout.worker.arriving import fill_in
from vllm_specrollout.worker.common import CHAIN_ASKED, IMAGES_BOTH_WAYS, ROWS_FOR_DRAFTS, Stats, config_of
from vllm_specrollout.worker.drafting import NO_DRAFTS, Drafting, begin_step, drafted_tokens, scheduled_trees
from vllm_specrollout.worker.hidden import Tap, WantedRows
from vllm_specrollout.worker.models import decoupled
from vllm_specrollout.worker.models.decoupled import sampling_on_v1
from vllm_specrollout.worker.models.drafter import ModelDrafter, tell
from vllm_specrollout.worker.models.swapping import Swapper
from vllm_specrollout.worker.request import RequestBook, RequestEntry
from vllm_specrollout.worker.scheduler import SpecRolloutOutput, endings_of, judged_of, step_of, waiting_of, wanted_of
from vllm_specrollout.worker.speculate import announce, make_speculator
from vllm_specrollout.worker.v1.proposer import feed, model_drafter_of, plain_processors
from vllm_specrollout.worker.v1.sampler import (
    ExponentialNoise,
    Noise,
    Sampled,
    SeedNoise,
    are_builtin,
    held_at_one,
    row_layout,
    sample_drafts,
)
from vllm_specrollout.worker.v1.thinking import clear_inherited, follow_plain_steps

NOBODY = (NO_DRAFTS, np.zeros(0, dtype=np.int32))

_Base: Any = object
if TYPE_CHECKING:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as _Base


@dataclass(slots=True)
class V1Step:
    """The step in progress: made when it begins, dropped with it."""

    # number of the engine step, and seconds when it began
    number: int
    begin: float
    # requests without a place in the batch
    waiting: int
    # the batch's requests, in its order, once they are sampled
    entries: Sequence[RequestEntry] = ()
    # over those requests; None: no drafts were scheduled
    trees: TreeBatch | None = None
    has_branches: bool = False
    sampled: Sampled | None = None
    # the request whose verdict was withheld, and what it did not get; None: nobody's was
    withheld: tuple[str, list[int]] | None = None
    verify_ms: float = 0.0
    # requests whose hidden states are wanted; None: others run
    wanted: dict[str, WantedRows] | None = None


class SpecRolloutV1(_Base):
    """Mixed into vLLM's runner: drafts ride on its outputs, the tapes through its sampler."""

    lays_out_chains = False
    # for a trainer; None: nobody asked
    tap: Tap | None = None
    # called before a step that computes; None: nobody has memory to give back
    before_step: Callable[[], object] | None = None
    # other weights for the model that drafts; None: there were none so far
    swapper: Swapper | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.noise = self._make_noise()
        self.sampler.topk_topp_sampler = self.noise.sampler
        if vllm_config.speculative_config is not None:
            self.input_batch.logitsprocs = plain_processors(self)
        self.spec_rollout, self.metrics = make_speculator(vllm_config, "v1")
        self.stats = Stats()
        self.book = self.admissions = RequestBook(DraftMode.OFF, self.noise.tape)
        self.shape: tuple[DraftMode, str] = (DraftMode.OFF, "the KV cache is not set up yet")
        is_checking = config_of(vllm_config).self_check != "off"
        self.drafting = Drafting.of(self.spec_rollout, self.parallel_config, is_checking=is_checking)
        self.weights_version = self.drafting.weights_version
        self.step = V1Step(0, 0.0, 0)
        self._planned = NO_DRAFTS  # drafts on their way through the scheduler
        # fields of the last completed step's `StepTiming`, as far as they are known; None: it was told
        self._timing: dict[str, Any] | None = None
        # no trees and no verdict, over the batch that went without drafts last
        self._undrafted = NOBODY
        self.model_drafter: ModelDrafter | None = None
        self.remote = decoupled.begin(self, sampling_on_v1(self))

    # --- set-up ------------------------------------------------------------------------------------------------------

    def _make_noise(self) -> Noise:
        """Where the noise of each position comes from, as in the sampler of the installed vLLM."""
        if features.installed().cpu_noise == "vector":
            return ExponentialNoise(self.sampler.logprobs_mode, self.model_config.get_vocab_size())
        return SeedNoise(self.sampler.logprobs_mode)

    def _kv_shape(self) -> tuple[DraftMode, str]:
        """What KV cache and attention allow to be drafted, and why not more."""
        raise NotImplementedError

    def _set_up_drafting(self) -> None:
        """Called at the end of `initialize_kv_cache`."""
        self.shape = self._model_shape()
        self.book = self.admissions = RequestBook(self.shape[0], self.noise.tape, self.drafting.admit)
        if self.speculative_config is not None:
            self.model_drafter = model_drafter_of(self) if self.shape[0] is not DraftMode.OFF else None
            follow_plain_steps(self.input_batch)
            self.speculative_config = None  # the model is loaded: from now on vLLM's runner takes the plain way
        decoupled.join(self)
        announce(self.vllm_config, "V1", self.shape)
        if self.shape[0] is not DraftMode.TREE:
            effect = "off" if self.shape[0] is DraftMode.OFF else "chains only"
            logger.warning("Spec rollout: drafts are %s for this model: %s", effect, self.shape[1])

    def _fit(self, trees: TreeBatch, batch: RequestBatch) -> TreeBatch:
        """The trees, cut to what the runner has room for."""
        return trees

    def _model_shape(self) -> tuple[DraftMode, str]:
        if self.model_config.is_encoder_decoder or getattr(self, "uses_xdrope_dim", 0):
            return DraftMode.OFF, "encoder-decoder model, or positions of XD-RoPE"
        if not are_builtin(self.input_batch.logitsprocs):
            return DraftMode.OFF, "custom logits processors may keep state that a draft would disturb"
        shape, reason = self._kv_shape()
        if shape is DraftMode.TREE and self.model_config.is_mm_prefix_lm:
            return DraftMode.CHAIN, IMAGES_BOTH_WAYS
        if shape is DraftMode.TREE and self.shared_kv_cache_layers:
            return DraftMode.CHAIN, "layers share their KV cache"
        if shape is DraftMode.TREE and config_of(self.vllm_config).shape == "chain":
            return DraftMode.CHAIN, CHAIN_ASKED
        return shape, reason

    def _on_request_state_removed(self, req_id: str, req_state: CachedRequestState | None) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._undrafted = NOBODY
        self.noise.settle()
        self.book.forget(req_id)
        self.drafting.forget(req_id)

    # --- before the forward pass -------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        if self.before_step is not None and scheduler_output.total_num_scheduled_tokens:
            self.before_step()
        if self._timing is not None:
            # From one step's beginning to the next: the engine's own work counts. A long gap means it had none.
            period_ms = (now - self.step.begin) * 1e3
            if period_ms < 2.0 * self._timing["step_ms"] + 5.0:
                self._timing["step_ms"] = period_ms
            self.settle()
        self.step = V1Step(step_of(scheduler_output), now, waiting_of(scheduler_output))
        self.step.wanted = wanted_of(scheduler_output)
        for req_id, (num_tokens, status) in endings_of(scheduler_output).items():
            if req_id in self.requests:  # it ended in the last step, with that one's weights
                entry = self.book.get(self.requests[req_id])
                self.spec_rollout.finish(entry.ended(num_tokens, status, self.weights_version.computed))
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self.requests:  # a session's part is over, and its next one comes
                entry = self.book.get(self.requests[new.req_id])
                self.spec_rollout.finish(entry.part_ended(self.weights_version.computed))
        begin_step(self.weights_version, scheduler_output)
        if self.swapper is not None:
            self.swapper.begin_step(judged_of(scheduler_output))
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if not scheduler_output.total_num_scheduled_tokens and (counts := self.metrics.take()):
            return SpecRolloutOutput.carrying(output, counts=counts)  # the engine falls idle
        return output

    def settle(self) -> None:
        """Tell what the last step cost, as far as it is known; the next one's beginning would say it better."""
        if self._timing is not None:
            self.drafting.timed(StepTiming(**self._timing))
            self._timing = None

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        parts = [new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in self.requests]
        result = super()._update_states(scheduler_output)
        for name in parts:
            self._next_part(self.requests[name])
        if scheduler_output.scheduled_new_reqs:
            fill_in(self, scheduler_output)  # those that were begun elsewhere
        holder = self.input_batch.thinking_budget_state_holder
        if holder is not None and holder.has_tracked_requests():
            clear_inherited(self.input_batch, self.requests)
        # the tapes own them; vLLM 0.32 would rewind them after a prefill chunk, which on CPU is an error
        self.input_batch.generators.clear()
        return result

    def _next_part(self, state: CachedRequestState) -> None:
        """A session goes on, which is a new request to whoever drafts."""
        assert state.sampling_params is not None
        if state.generator is None and state.sampling_params.temperature >= 1e-5:
            # it was greedy so far, and vLLM makes a generator for first parts alone
            state.generator = torch.Generator(device=self.device)
            state.generator.manual_seed(state.sampling_params.seed)
        self.drafting.forget(state.req_id)
        self.book.next_part(state)

    def unfinished(self) -> list[Answer]:
        """What the engine leaves behind when it is shut down."""
        version = self.weights_version.computed
        running = [self.book.get(state) for state in self.requests.values() if state.output_token_ids]
        return [entry.ended(len(entry.state.output_token_ids), FinishReason.ABORTED, version) for entry in running]

    def standing(self) -> dict[str, tuple[int, int]]:
        """Request that runs, or was preempted -> tokens of its prompt, and of its answer so far."""
        return {name: (one.num_prompt_tokens, len(one.output_token_ids)) for name, one in self.requests.items()}

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if not scheduled:
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.speculative_config = ROWS_FOR_DRAFTS  # only asked whether it is None
        try:
            result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        finally:
            self.speculative_config = None
        begin = time.perf_counter()
        trees = self.step.trees = scheduled_trees(self._planned, self.input_batch.req_ids, scheduled)
        self.step.has_branches = bool(with_branches(trees).any())
        if self.step.has_branches or self.lays_out_chains:
            self._lay_out(trees)
        self.stats.layout_ms += (time.perf_counter() - begin) * 1e3
        return result

    def _lay_out(self, trees: TreeBatch) -> None:
        """Make branches ready for the forward pass."""
        raise NotImplementedError

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = super()._model_forward(*args, **kwargs)
        self.stats.forward_ms += (time.perf_counter() - begin) * 1e3
        return result

    # --- after the forward pass --------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        n = self.input_batch.num_reqs
        entries = self.step.entries = self.book.of_batch(self.input_batch.req_ids, self.requests)
        metadata = self.input_batch.sampling_metadata
        trees = self.step.trees
        if trees is None:
            if not metadata.all_greedy:
                self.noise.set_roots(entries)
            output, kept = self.sampler(logits=logits, sampling_metadata=metadata), None
        else:
            row_request, row_depth = row_layout(trees)
            if not metadata.all_greedy:
                self.noise.set_nodes(entries, trees.node_start, row_depth)
            sampled = sample_drafts(self.sampler, logits, metadata, trees, row_request, row_depth)
            self.drafting.followed(trees, sampled.output.sampled_token_ids.numpy(), sampled.num_accepted + 1)
            if self.drafting.withholding:
                sampled = self._withhold(sampled)
            self.step.sampled = sampled
            self._commit(sampled, trees)
            output, kept = sampled.output, sampled.num_accepted + 1
        self.noise.keep(entries, kept, self.discard_request_mask.np[:n])
        self.step.verify_ms = (time.perf_counter() - self.step.begin) * 1e3
        return output

    def _withhold(self, sampled: Sampled) -> Sampled:
        """The step, with one request held at the first token of its path."""
        name, self.drafting.withholding = self.drafting.withholding, ""
        if name in self.input_batch.req_ids:
            sampled, rest = held_at_one(sampled, self.input_batch.req_ids.index(name))
            self.step.withheld = (name, rest) if rest else None
        return sampled

    def _commit(self, sampled: Sampled, trees: TreeBatch) -> None:
        """Bring the accepted keys and values to where plain decoding would have put them."""
        raise NotImplementedError

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if self.step.wanted and self.tap is not None:
            with self.spec_rollout.guard.over("sending hidden states", "a trainer misses some"):
                self.tap.take(
                    self.step.wanted,
                    self.weights_version.number,
                    self.input_batch.req_ids,
                    self.query_start_loc.np,
                    state.hidden_states,
                    state.aux_hidden_states,
                )
        output = super().sample_tokens(grammar_output)
        if not isinstance(output, ModelRunnerOutput) or not output.sampled_token_ids:
            return output
        draft_ms = 0.0
        if self.shape[0] is not DraftMode.OFF:
            self._observe(output)
            if self.model_drafter is not None:
                tell(self, lambda drafter: feed(drafter, self, state, output))
            self._planned = self.drafting.plan(lambda: self._requests(output), self.step.number + 1, self._fit)
            draft_ms = self.drafting.ms
            if self.model_drafter is not None:
                tell(self, lambda drafter: drafter.flush_if_due())
            counts = self.metrics.take_if_due()
            tokens = DraftTokenIds(*drafted_tokens(self._planned)) if self._planned.num_nodes else None
            judged = None if self.swapper is None else self.swapper.verdict
            if counts or tokens is not None or judged is not None:
                output = SpecRolloutOutput.carrying(output, tokens, counts=counts, judged=judged)
        self._timing = self._account(output, draft_ms)
        return output

    def _observe(self, output: ModelRunnerOutput) -> None:
        """Tell what became of this step's drafts, and which requests have begun."""
        trees, sampled = self.step.trees, self.step.sampled
        if trees is None or sampled is None:
            if self._undrafted[0].request_ids != output.req_ids:
                self._undrafted = (empty_trees(output.req_ids), np.zeros(len(output.req_ids), dtype=np.int32))
            nobody, none = self._undrafted
            self.drafting.observe(self.drafting.planned, nobody, none, none[:0])
        else:
            self.drafting.observe(self.drafting.planned, trees, sampled.num_accepted, sampled.accepted)
        if self.step.withheld is not None or self.drafting.withheld.held:
            self._compare(output)
        batch, version = self.input_batch, self.weights_version.number
        for i, entry in self.book.begun(output.req_ids, output.sampled_token_ids):
            tokens = batch.token_ids_cpu[i, : int(batch.num_tokens_no_spec[i])]
            self.drafting.begin(entry.seen(tokens, self.max_model_len, version))

    def _compare(self, output: ModelRunnerOutput) -> None:
        """Tokens decoded plainly meet those that were withheld before; and what this step withheld is remembered."""
        withheld, version = self.drafting.withheld, self.weights_version.number
        lengths = self.input_batch.num_tokens_no_spec
        for i, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if tokens and name in withheld.held:
                withheld.compare(name, tokens, int(lengths[i]) - len(tokens), version)
        if self.step.withheld is not None:
            name, rest = self.step.withheld
            length = int(lengths[output.req_ids.index(name)])
            withheld.hold(name, rest, length, version, has_branches=self.step.has_branches)

    def _requests(self, output: ModelRunnerOutput) -> RequestBatch | None:
        """The requests that may be drafted for, as they stand after this step; None where drafting is paused."""
        if self.drafting.is_paused(self.step.number + 1, len(output.req_ids)):
            return None
        batch, views, version = self.input_batch, [], self.weights_version.number
        lengths = batch.num_tokens_no_spec[: len(output.req_ids)].tolist()
        for i, (entry, tokens) in enumerate(zip(self.step.entries, output.sampled_token_ids, strict=True)):
            # without a token it is still in its prompt
            if tokens and entry.admission.shape is not DraftMode.OFF:
                views.append(entry.seen(batch.token_ids_cpu[i, : lengths[i]], self.max_model_len, version))
        return RequestBatch.of(views)

    def _account(self, output: ModelRunnerOutput, draft_ms: float) -> dict[str, Any]:
        """Add the step to the totals; returns what is known of its `StepTiming` so far."""
        stats, step, batch = self.stats, self.step, len(output.req_ids)
        rows, nodes = int(self.query_start_loc.np[batch]), 0 if step.trees is None else step.trees.num_nodes
        if step.sampled is not None:
            stats.accepted += int(step.sampled.num_accepted.sum())
        timing = dict(
            batch=batch,
            rows=rows,
            nodes=nodes,
            branches=num_branches(step.trees) if step.has_branches and step.trees is not None else 0,
            tokens=sum(map(len, output.sampled_token_ids)),
            step_ms=step.verify_ms + draft_ms,
            is_decode_only=rows - nodes == batch,
            trees=0 if step.trees is None else int(np.count_nonzero(step.trees.sizes)),
            context=int(self.input_batch.num_computed_tokens_cpu[:batch].sum()),
            waiting=step.waiting,
            ask_ms=draft_ms,
        )
        stats.steps, stats.request_steps = stats.steps + 1, stats.request_steps + batch
        stats.step_ms, stats.draft_ms = stats.step_ms + step.verify_ms, stats.draft_ms + draft_ms
        stats.steps_with_drafts += step.sampled is not None
        stats.drafted, stats.output_tokens = stats.drafted + nodes, stats.output_tokens + timing["tokens"]
        return timing
