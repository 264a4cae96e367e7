"""`placement: auto`: a model drafts in the target's steps or beside them, whichever a duel finds to be faster.

What belongs here: what changes between two steps when the other arrangement is used. Who wins is said by
decoupled/duel.py. Both arrangements give the same tokens, so it may change at any step.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_specrollout.budgets.base import Backoff, Budget
from vllm_specrollout.budgets.registry import make_budget
from vllm_specrollout.decoupled.duel import Duel
from vllm_specrollout.drafters.decoupled import DecoupledDrafter
from vllm_specrollout.observe.listener import Listener
from vllm_specrollout.types import StepRecord
from vllm_specrollout.worker.common import config_of
from vllm_specrollout.worker.decoupling import own_cores, use_cores
from vllm_specrollout.worker.model_drafter import ModelDrafter

COUPLED, DECOUPLED = 0, 1


class Placing(Listener):
    """Tells the duel what steps took, and does what it says.

    Args:
        runner: ours, with a model that drafts here, and drafters elsewhere.
    """

    def __init__(self, runner: Any) -> None:
        config = config_of(runner.vllm_config)
        self.duel = Duel()
        self.now, self.changes = COUPLED, 0
        self._speculator = runner.spec_rollout
        self._here: ModelDrafter = runner.model_drafter
        self._elsewhere: DecoupledDrafter = runner.remote
        # of the target: all of them, and those beside the drafters; empty: nothing moves
        self._cores = set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
        self._own_cores = own_cores(config, self._cores)
        # steps take another time on fewer cores, and drafts cost something else: each arrangement learns for itself
        self._budgets = [runner.spec_rollout.budget, make_budget(config)]
        self._elsewhere.rest(True)

    def stepped(self, record: StepRecord) -> None:
        timing = record.timing
        is_there = any(link.is_there for link in self._elsewhere.links.values())
        if not is_there or self._here not in self._speculator.drafters:
            self.arrange(DECOUPLED if is_there else COUPLED)
            return
        if timing is not None and timing.is_decode_only:
            self.duel.step(timing.batch, timing.tokens, timing.step_ms / 1e3)
        self.arrange(self.duel.choice)

    def renew(self, budget: Budget) -> None:
        """A budget for the arrangement that is not used now; the speculator has the other one."""
        self._budgets[1 - self.now] = budget

    def arrange(self, arrangement: int) -> None:
        """From the next step on, the model drafts here or elsewhere."""
        if arrangement == self.now:
            return
        self._budgets[self.now] = self._speculator.budget
        self.now, self.changes = arrangement, self.changes + 1
        self._here.is_resting = arrangement == DECOUPLED
        self._elsewhere.rest(arrangement == COUPLED)
        self._speculator.budget = self._budgets[arrangement]
        self._speculator.backoff = Backoff()
        if self._own_cores:
            use_cores(self._own_cores if arrangement == DECOUPLED else self._cores)
