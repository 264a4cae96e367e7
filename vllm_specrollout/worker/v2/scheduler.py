"""The schedulers for the V2 runner: stock vLLM's, leaving room for drafts that the device makes.

The next step is scheduled before this step's tokens are known, so drafts cannot be scheduled; room for them can. Every
running request gets placeholders, as many as the worker's last report says. Stock code takes what was not accepted,
filled or not, back from the request's counters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor import Executor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_specrollout.patches import features
from vllm_specrollout.scheduling.lookahead import room_per_request
from vllm_specrollout.worker.common import levels_of, with_lane
from vllm_specrollout.worker.scheduler import DraftReport, SchedulerMixin, SpecRolloutOutput
from vllm_specrollout.worker.v2.beams import scratch_blocks

# vLLM's mark for a draft that the grammar forbids; rows behind it are not masked, and no walk gets there
_FORBIDDEN = -1


class MasksForDrafts:
    """vLLM's applier of masks, with room for as many as any step has had so far.

    Its own has room for one per request. One per row would take hundreds of MiB, grammar or not.
    """

    def __init__(self, make: Callable[[int], StructuredOutputsWorker], most: int) -> None:
        self._make = make
        self._most = most
        self._size = 0
        self._worker: StructuredOutputsWorker | None = None

    def apply_grammar_bitmask(
        self, logits: torch.Tensor, input_batch: InputBatch, request_ids: list[str], bitmask: np.ndarray
    ) -> None:
        if len(bitmask) > self._size:
            self._size = min(self._most, max(len(bitmask), 2 * self._size))
            self._worker = self._make(self._size)
        if self._worker is not None:
            self._worker.apply_grammar_bitmask(logits, input_batch, request_ids, bitmask)


def with_masks_for_drafts(runner: Any) -> MasksForDrafts | None:
    """What takes the place of vLLM's applier of masks, if it has one."""
    stock = runner.structured_outputs_worker
    if stock is None:
        return None
    more = {} if features.installed().mask_stride == "fixed" else {"num_bonus_tokens": stock.num_bonus_tokens}

    def make(size: int) -> StructuredOutputsWorker:
        return StructuredOutputsWorker(
            max_num_logits=size,
            vocab_size=runner.vocab_size,
            device=runner.device,
            mask_stride=1 + runner.max_draft_tokens,
            **more,
        )

    return MasksForDrafts(make, runner.max_num_reqs * (1 + runner.max_draft_tokens))


def drafted_schedule(
    scheduler_output: SchedulerOutput,
    request_ids: Sequence[str],
    drafts: DraftTokenIds | None,
    requests: Mapping[str, Request],
    manager: StructuredOutputManager,
) -> SchedulerOutput:
    """A copy of a step's schedule in which the room of `request_ids` has become what was drafted into it.

    The row of a draft that the grammar forbids is masked like any other, so that draft is not sampled: the walk ends
    there at the latest, and it does not matter that the rows behind it allow everything.
    """
    drafted = {} if drafts is None else dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))
    step = copy.copy(scheduler_output)
    step.scheduled_spec_decode_tokens = {}
    for request_id in request_ids:
        # all of the room has rows, whether there is a draft or not
        most = len(scheduler_output.scheduled_spec_decode_tokens[request_id])
        tokens = itertools.takewhile(_FORBIDDEN.__ne__, drafted.get(request_id, ())[:most])
        allowed = manager.validate_tokens(requests[request_id], list(tokens))
        step.scheduled_spec_decode_tokens[request_id] = allowed + [_FORBIDDEN] * (most - len(allowed))
    return step


class SchedulerMixinV2(SchedulerMixin):
    """Mixed into vLLM's schedulers: leaves room for drafts."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.max_draft_tokens = with_lane(vllm_config).speculative_config.num_speculative_tokens
        self._report = DraftReport()
        self._workers: Executor | None = None
        # a model writes keys and values of what it only drafts; one that fills all levels in at once, one more
        levels = levels_of(vllm_config)
        self.num_lookahead_tokens = max(self.num_lookahead_tokens, levels and levels + 1)

        # what heads that draft trees write there nobody else may have
        pool = self.kv_cache_manager.block_pool
        if count := scratch_blocks(vllm_config, self.kv_cache_config):
            for block in pool.blocks[-count:]:
                pool.free_block_queue.remove(block)
            pool.num_gpu_blocks -= count

    def meet_workers(self, executor: Executor) -> None:
        """Called once by the engine core, before the first step. Not called: a grammar's requests decode plainly."""
        self._workers = executor

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self._step + 1 < self._report.asks_at:
            return  # the next step comes before that
        room = room_per_request(
            min(self.max_draft_tokens, self._report.most),
            num_running=len(self.running),
            has_waiting=bool(self.waiting) or any_in_prompt(self.running),
            max_tokens_per_step=self.max_num_scheduled_tokens,
        )
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            limit = min(room, self._report.limits.get(request_id, room))
            if request.use_structured_output and self._workers is None:
                continue
            if limit > 0 and not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * limit

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Asked for when the step's rows are chosen and every token before them is known to the grammars."""
        with_room = [
            request_id
            for request_id in scheduler_output.scheduled_spec_decode_tokens
            if (request := self.requests.get(request_id)) is not None and request.use_structured_output
        ]
        if with_room:
            assert self._workers is not None
            drafts = self._workers.take_draft_token_ids()
            scheduler_output = drafted_schedule(
                scheduler_output,
                with_room,
                drafts,
                self.requests,
                self.structured_output_manager,
            )
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, SpecRolloutOutput) and model_runner_output.report is not None:
            self._report = model_runner_output.report
        if self.spec_decode_metrics_level != "none":
            # placeholders are not drafts: vLLM counts none that it is told were invalid
            scheduler_output.num_invalid_spec_tokens = {
                request_id: len(placeholders) - self._report.drafted.get(request_id, 0)
                for request_id, placeholders in scheduler_output.scheduled_spec_decode_tokens.items()
            }
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        # placeholders are not drafts: count what the worker filled
        drafted = self._report.drafted.get(request_id, 0)
        if not self.log_stats or not drafted:
            return spec_decoding_stats
        if spec_decoding_stats is None:
            spec_decoding_stats = SpecDecodingStats.new(self.max_draft_tokens)
        spec_decoding_stats.observe_draft(drafted, num_accepted_tokens)
        return spec_decoding_stats


def any_in_prompt(running: Iterable[Request]) -> bool:
    """Whether a running request has more of its prompt to compute: room would take the tokens of its next piece."""
    return any(request.is_prefill_chunk for request in running)


class SpecRolloutSchedulerV2(SchedulerMixinV2, Scheduler):
    """Steps in lockstep with the engine."""


class SpecRolloutAsyncScheduler(SchedulerMixinV2, AsyncScheduler):
    """Schedules a step while the one before it still runs."""

    slots_ahead = 1
