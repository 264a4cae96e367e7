"""The lane: vLLM's own speculation on its V2 runner, made exact, with drafts that are looked up on the device.

What belongs here: where the lane differs from a plain step. vLLM drafts behind its sampler and schedules a step ahead,
so no step waits for the host. The host learns of drafts and tokens when they are home anyway; what it makes of that,
a pause or a request's most drafts, holds from the next schedule on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.speculator import PlannedStep
from vllm_specrollout.trees.batch import cut, over
from vllm_specrollout.types import DraftLimits, DraftMode, IntArray, RequestBatch, TreeBatch, VerifyResult
from vllm_specrollout.worker.drafting import NO_DRAFTS
from vllm_specrollout.worker.scheduler import DraftReport
from vllm_specrollout.worker.v2.host import InFlight
from vllm_specrollout.worker.v2.inputs import emptied, holds_prompt
from vllm_specrollout.worker.v2.looked_up import Home, LookedUp, Told
from vllm_specrollout.worker.v2.runner import SpecRolloutV2

TREES_UP_TO = 8
"""Requests of a step, at most, that trees are drafted for: among more, rows cost more than branches bring."""


class Lane(SpecRolloutV2):
    """Mixed into vLLM's V2 runners whose configuration has a place for drafts (`with_lane`)."""

    speculator: LookedUp

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.max_draft_tokens = self.num_speculative_steps
        rows = self.req_states.req_id_to_index
        self.speculator = LookedUp(self.num_speculative_steps, self.req_states, device, self._told_of, rows.get)
        # what steps to come are planned by; None: nothing was
        self._planned: PlannedStep | None = None
        # the drafts that came home last, whatever had room, for whoever chooses how many are verified
        self.latest: TreeBatch = NO_DRAFTS
        # requests whose verdict is withheld in a step that is not home yet
        self._withheld: dict[str, None] = {}
        self.host.came_home = self._came_home

    def _told_of(self, name: str) -> Told | None:
        """What the lookup is to know of a request; None: nothing is drafted for it."""
        request = self.host.get(name)
        if request is None or request.admission.shape is DraftMode.OFF:
            return None
        limit = min(request.admission.max_draft_tokens, self.max_draft_tokens)
        # it decodes plainly until what was withheld of it is found again, or on its way home
        if name in self.drafting.withheld.held or name in self._withheld:
            limit = 0
        return Told(-1, (), request.admission.ends, limit, request.admission.shape is DraftMode.CHAIN)

    def _may_branch(self, num_requests: int) -> bool:
        return self.shape[0] is DraftMode.TREE and num_requests <= TREES_UP_TO

    # --- a step ------------------------------------------------------------------------------------------------------

    def _begun(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        step = self.step
        if self.shape[0] is DraftMode.OFF:
            self.speculator.is_paused = True
            return emptied(scheduler_output)
        step.room = {name: len(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()}
        step.has_drafts = bool(step.room)
        if step.has_drafts:
            self.times.begin_step()
            self._withhold()
            # a prompt stays with vLLM's attention, and so does all that is computed beside it
            self.inputs.has_branches = self._may_branch(step.num_running) and not holds_prompt(scheduler_output)
            if self.inputs.has_branches:
                self._during.enter_context(self.draft_graphs.chosen_from(self))
        # vLLM's scheduler was told of no drafts, so it names none to be made
        scheduler_output.num_spec_tokens_to_schedule = self.max_draft_tokens
        after = step.number + 1
        self.speculator.may_branch = self._may_branch(step.num_running)
        self.speculator.is_paused = self.drafting.speculator.steps_off(after, step.num_running) > 0
        return scheduler_output

    def prepare_inputs(self, *args: Any) -> InputBatch:
        batch = super().prepare_inputs(*args)
        if self.step.has_drafts:
            self.step.num_logits = np.diff(batch.cu_num_logits_np)
            self.inputs.set_looked_up(batch, self.speculator.drafted)
        return batch

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        found = super().sample(hidden_states, input_batch, grammar_output)
        if not self.speculator.is_paused or self.step.has_drafts:
            # on the stream on which vLLM copies the tokens next, so that one event says that all of it is there
            words = self.speculator.home(input_batch)
            self.output_copy_stream.wait_stream(self.main_stream)
            with torch.cuda.stream(self.output_copy_stream):
                home = Home(input_batch.req_ids, async_copy_to_np(words))
            self.step.home, self.step.drafted = home, lambda: self._came(home, words)
        return found

    def _withhold(self) -> None:
        """Choose a request whose verdict is withheld, now and then, of those that were last seen with drafts."""
        step, withheld = self.step, self.drafting.withheld
        if self.drafting.is_drafting and withheld.drafted >= withheld.due:
            seen = over(self.latest, list(step.room))
            if seen.num_nodes:
                step.withheld = withheld.choose(seen)
        if step.withheld:
            self._withheld[step.withheld] = None

    def _came(self, home: Home, words: torch.Tensor) -> TreeBatch:
        """The step's drafts are home. Until then `words` [R, 3 * K + 1] is kept, which they are copied from."""
        self.latest = home.proposed()
        return cut(self.latest, home.rows)

    def _came_home(self, step: InFlight, counts: IntArray, result: VerifyResult) -> None:
        self._withheld.pop(step.withheld, None)

    def _learn(self) -> None:
        # what is home is taken in, and nothing is waited for
        self.take_in(self.host.num_out)
        super()._learn()
        self.step.planned = self._planned

    # --- what the host makes of it -----------------------------------------------------------------------------------

    def _report(self, output: Any) -> DraftReport:
        after = self.step.number + 1
        limits = self.host.limits.copy()
        if not self.speculator.is_paused and self.drafting.is_drafting:
            try:
                limits |= self._windows()
            except CONTAINED as error:
                self.spec_rollout.guard.failed("planning", error, "requests get as much room as they may")
        report = DraftReport(after + self.drafting.steps_off(after, self.step.num_running), limits, {})
        get_output, home = output.get_output, self.step.home

        def counted() -> Any:
            found = get_output()
            if home is not None:
                trees = cut(home.proposed(), home.rows)
                report.drafted.update(zip(trees.request_ids, trees.sizes.tolist(), strict=True))
            return found

        if self.step.has_drafts:
            output.get_output = counted
        return report

    def _windows(self) -> dict[str, int]:
        """Most drafts of requests of which the budget would verify fewer than there are, by what came home last."""
        room = dict.fromkeys(self.req_states.req_id_to_index, self.max_draft_tokens)
        batch = self.host.batch(room, may_branch=False)
        self._planned = None
        if not batch.size:
            return {}
        self.drafting.withheld.narrow(batch)
        self._planned = planned = self.drafting.speculator.propose(batch, self.step.number)
        chosen = cut(planned.plan.trees, batch.max_nodes).sizes
        proposed = np.max([np.zeros_like(chosen), *(one.sizes for one in planned.proposals)], axis=0)
        is_cut = (chosen < proposed) | ((proposed == 0) & self.drafting.speculator.budget.backs_off)
        return {name: int(chosen[i]) for i, name in enumerate(batch.request_ids) if is_cut[i]}


class LateDrafts(BaseDrafter):
    """The drafts that came home last, for a budget that chooses how many of the next ones are verified.

    Args:
        lane: the runner that has them.
    """

    name = "history"
    is_lookup = True

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        return cut(over(self._lane.latest, batch.request_ids), np.minimum(limits.wanted(0), limits.max_depth))
