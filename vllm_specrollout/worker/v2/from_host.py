"""Drafts from the host: the V2 runner waits for the tokens of the steps before, and then fills the room it was left.

What belongs here: the moment at which drafts are made, and how they get into a schedule that left room for them. The
runner never learns that it speculates: `speculative_config` stays None, so none of vLLM's own drafting runs and nothing
is captured or sized for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.drafting import drafted_tokens
from vllm_specrollout.worker.v2.graphs import profiled_graphs
from vllm_specrollout.worker.v2.inputs import emptied, fill, holds_prompt
from vllm_specrollout.worker.v2.runner import SpecRolloutV2


class DraftedByHost(SpecRolloutV2):
    """Mixed into vLLM's V2 runners: drafts at the last moment."""

    def capture_model(self, **kwargs: Any) -> int:
        # vLLM 0.29 knows no `profile_only`
        if kwargs.get("profile_only"):
            return super().capture_model(**kwargs) + profiled_graphs(self)
        if self.shape[0] is not DraftMode.OFF:
            # before vLLM's own, which locks the workspaces when it is done
            self.draft_graphs.capture(self)
        return super().capture_model(**kwargs)

    def _begun(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        if not scheduler_output.scheduled_spec_decode_tokens:
            return scheduler_output
        self.step.room = {rid: len(ids) for rid, ids in scheduler_output.scheduled_spec_decode_tokens.items()}
        return emptied(scheduler_output)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().update_requests(scheduler_output)
        if self.step.room:
            # all that vLLM does for a step without its tokens is done, so that the device waits for less
            self._draft_into(scheduler_output)

    def take_draft_token_ids(self) -> DraftTokenIds:
        """The drafts of the step in progress; the scheduler asks before it masks rows by a grammar."""
        return DraftTokenIds(*drafted_tokens(self.step.trees))

    @property
    def _takes_in(self) -> bool:
        """Whether the tokens of earlier steps are waited for: on every rank where a model drafts, by the same rows."""
        is_on_all_ranks = self.model_drafter is not None and self.drafting.group is not None
        return is_on_all_ranks or not self.step.is_paused

    def _draft_into(self, scheduler_output: SchedulerOutput) -> None:
        """Put drafts into the room that was left in the schedule; what stays empty is gone."""
        step = self.step
        if self._takes_in:
            if self.host.num_in_flight and self.model_drafter is None:
                # What vLLM does next, and then finds done. It turns its host buffers once more by that, which is safe:
                # the wait for all earlier steps lies between. A model that drafts does so by the last step's tables,
                # on all ranks.
                self.block_tables.apply_staged_writes()
            self.take_in()  # the only wait there is
        # a prompt stays with vLLM's attention, and so does all that is computed beside it
        may_branch = self.shape[0] is DraftMode.TREE and not holds_prompt(scheduler_output)
        step.trees = self.host.plan(step.room, may_branch, step.number, step.is_paused)
        step.planned, step.ask_ms = self.drafting.planned, self.drafting.ms
        step.withheld = self.drafting.withholding
        self.stats.draft_ms += step.ask_ms
        if step.planned is not None:
            self._took("draft", step.ask_ms)
        fill(scheduler_output, step.trees)
        step.has_drafts = bool(step.trees.num_nodes)
        if step.has_drafts:
            self.inputs.expect(step.trees)
            self.times.begin_step()
            self._during.enter_context(self.draft_graphs.chosen_from(self))

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_req_state: Any, batch_desc: Any, *more: Any
    ) -> InputBatch:
        arguments = (scheduler_output, batch_req_state, batch_desc, *more)
        if not self.step.has_drafts:
            self.inputs.set_plain()
            return super().prepare_inputs(*arguments)
        stock, self.decode_query_len = self.decode_query_len, self.max_draft_tokens + 1
        try:  # vLLM sizes a request's logits rows by it
            batch = super().prepare_inputs(*arguments)
        finally:
            self.decode_query_len = stock
        self.step.num_logits = np.diff(batch.cu_num_logits_np)
        self.inputs.set_trees(batch, self.step.trees)
        # attention's metadata must fit what the step's graph was captured for, if it has one
        batch.max_query_len = batch_desc.max_query_len
        return batch
