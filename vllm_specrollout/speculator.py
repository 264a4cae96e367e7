"""The step in two halves: propose() before a forward pass, observe() after it. V1, V2 and replay use it alike. Pure.

What belongs here: the order in which budget, drafters and listeners are asked, and what they hand over being checked.
Nothing that fails here reaches the engine (contained.py): the step goes on without drafts.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import numpy as np

from vllm_specrollout import _core
from vllm_specrollout.budgets.base import Backoff, Budget, sound_limits, sound_plan
from vllm_specrollout.drafters.base import BaseDrafter, Drafter
from vllm_specrollout.history.vocabulary import ANY_TOKEN
from vllm_specrollout.observe.contained import RESTS, Contained
from vllm_specrollout.observe.guard import CONTAINED, Guard
from vllm_specrollout.observe.listener import NOTHING_TO_DRAFT, Listener
from vllm_specrollout.observe.probation import NEVER
from vllm_specrollout.trees.batch import on_host, without_ends
from vllm_specrollout.types import (
    Answer,
    DraftLimits,
    RequestBatch,
    RequestView,
    StepPlan,
    StepRecord,
    StepTiming,
    TreeBatch,
    VerifyResult,
    empty_trees,
)

T = TypeVar("T")
_UNWATCHED = "metrics or a recording lack a step"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What a step was planned from; whoever carries the step hands it back with the verdict."""

    plan: StepPlan
    batch: RequestBatch
    proposals: Sequence[TreeBatch] = ()


class Speculator(Contained):
    """Drafters and budget of one engine.

    Args:
        vocab_size: the model's; a drafter that proposes a token outside of it has failed.
        guard: contains failures; default: as strict as the environment says.
        listeners: told of every step; they never change one.
        time_share: of what the rest of a step takes, so much may each drafter take; without a limit where the guard is
            strict, since what then happens depends on the clock.
        clock: seconds, from any zero.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        budget: Budget,
        *,
        vocab_size: int = ANY_TOKEN,
        guard: Guard | None = None,
        listeners: Sequence[Listener] = (),
        time_share: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(drafters, budget, guard, listeners, time_share, clock)
        self.guard.listener = lambda part: self._tell(lambda listener: listener.failed(part))
        self.vocab_size = vocab_size
        self.stopped = ""
        """Why nothing is drafted any more, fit to be a metric's label; empty: it is."""
        self.backoff = Backoff()
        # requests of the step at hand, those included that are not drafted for
        self._running = 0
        # steps whose time is not known yet
        self._untimed: deque[StepRecord] = deque()
        self._begun: set[str] = set()  # and not over

    # --- before the forward pass -------------------------------------------------------------------------------------

    def admit(self, view: RequestView) -> None:
        """A request has come. Drafters may get ready for it, whatever the budget does."""
        for drafter in self._told:
            self._drafter_does(drafter, lambda drafter: drafter.admit(view))

    def begin(self, view: RequestView) -> None:
        """The request's first token is known: it can be drafted for from now on."""
        self._begun.add(view.request_id)
        self._tell(lambda listener: listener.admitted(view))

    def is_paused(self, step: int, num_requests: int) -> bool:
        """Whether this engine step is known to go without drafts; if so, it need not be proposed for.

        Asked once per step, before its requests are looked at, which takes time at large batches.
        """
        self._step, self._running = step, num_requests
        if self.probation.next_due <= step:
            self._try_again(step)
        if self.stopped:
            reason = self.stopped
        elif self.backoff.steps_left(step, num_requests):
            reason = "drafts do not pay"
        elif self._budget_does(lambda budget: int(budget.steps_off(num_requests))):
            reason = self.budget.why_off
        elif self.probation.out and self.probation.steps_left(self.budget, step):
            reason = RESTS
        else:
            return False
        self._tell(lambda listener: listener.paused(num_requests, reason))
        return True

    def steps_off(self, step: int, num_requests: int) -> int:
        """How many steps from this one on are known to go without drafts."""
        if self.stopped:
            return NEVER
        off = self._budget_does(lambda budget: int(budget.steps_off(num_requests)))
        off = self.probation.steps_left(self.budget, step) if off is None else off
        return max(self.backoff.steps_left(step, num_requests), off)

    def propose(self, batch: RequestBatch, step: int) -> PlannedStep:
        """Plan the engine step `step`: draft trees for the requests of the batch, in its order."""
        begin, self._step = self._clock(), step
        nothing = empty_trees(batch.request_ids)
        limits = self._budget_does(lambda budget: sound_limits(budget.limits(batch), batch.size))
        if limits is None or not limits.wants_any:
            reason = (limits.reason if limits is not None else "") or NOTHING_TO_DRAFT
            return self._planned(batch, limits, (), StepPlan(nothing, reason, is_on=False, pays=False), begin)
        proposals = self._proposals(batch, limits, step)
        if not proposals:
            plan = StepPlan(nothing, "nothing proposed", pays=False, reach=np.zeros(0, np.float32))
            self._weigh(plan)
            if self.budget.backs_off and not self._asking.overruns and not any(d.works_ahead for d in self.drafters):
                self.backoff.asked(step, self._running, False)
            return self._planned(batch, limits, (), plan, begin)
        chosen = self._budget_does(lambda budget: self._chosen(budget, proposals, limits, batch))
        plan = chosen or StepPlan(nothing, RESTS, is_on=False, pays=False)
        self.backoff.asked(step, self._running, self._weigh(plan) or bool(plan.pays))
        return self._planned(batch, limits, proposals, plan, begin)

    def _weigh(self, plan: StepPlan) -> bool:
        """Learn what expensive drafters brought, and whether one that was tried for a request would pay for all. What
        goes wrong at that lies in what the budget made of them."""
        return bool(self.worth.asked and self._budget_does(lambda budget: self.worth.learn(plan)))

    def _planned(
        self,
        batch: RequestBatch,
        limits: DraftLimits | None,
        proposals: Sequence[TreeBatch],
        plan: StepPlan,
        begin: float,
    ) -> PlannedStep:
        draft_ms = (self._clock() - begin) * 1e3
        if limits is not None:
            self._tell(lambda listener: listener.planned(batch, limits, proposals, plan, draft_ms))
        return PlannedStep(plan, batch, proposals)

    def _proposals(self, batch: RequestBatch, limits: DraftLimits, step: int) -> list[TreeBatch]:
        """The drafters' trees, of those that have any. Expensive ones come last, and are asked where the answers so far
        leave something to bring; one that looks up is none. One that works ahead is asked always: that tells it which
        tokens hold, and without it the drafter goes on behind old ones. One that has had more than its share of the
        time is not."""
        step_ms, prices, self._asking.ms = limits.token_ms * batch.size, self._asking.prices, 0.0
        self.worth.asked.clear()
        overruns = self._asking.overruns
        asked = [d for d in self.drafters if d.name not in overruns] if overruns else self.drafters
        free = {d.name for d in asked if d.works_ahead or d.is_lookup}
        order = [(d.name not in free and prices[d.name].is_expensive(batch.size, step_ms), d) for d in asked]
        order.sort(key=itemgetter(0))
        limit_ms = self._asking.limit_ms(batch.size)
        found: list[TreeBatch] = []
        for is_expensive, drafter in order:
            own = self._where_it_pays(drafter, found, limits, batch, step) if is_expensive else limits
            try:
                trees = self._asked(drafter, batch, own, math.inf if drafter.is_in_step else limit_ms)
            except CONTAINED as error:
                self.failed(drafter, error)
                continue
            if trees is not None and trees.num_nodes:
                found.append(trees)
        return found

    def _where_it_pays(
        self, drafter: Drafter, found: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch, step: int
    ) -> DraftLimits:
        """The limits, with an expensive drafter wanted for those requests where it brings more than it takes."""
        without = self._budget_does(lambda budget: budget.preview(found, limits, batch, self._asking.ms))
        if without is None:
            return limits
        source, price = self._sources[id(drafter)], self._asking.prices[drafter.name]
        narrowed = functools.partial(self.worth.narrowed, limits, source, drafter.name, price, without, step)
        return self._budget_does(lambda budget: narrowed()) or limits

    def _asked(self, drafter: Drafter, batch: RequestBatch, limits: DraftLimits, limit_ms: float) -> TreeBatch | None:
        """The drafter's trees for this batch; None: nothing is wanted of it."""
        num_wanted = int(np.count_nonzero(limits.wanted(self._sources[id(drafter)])))
        if not num_wanted:
            return None
        begin = self._clock()
        answer = drafter.propose(batch, limits)
        self._asking.spent(drafter.name, num_wanted, (self._clock() - begin) * 1e3, limit_ms)
        return without_ends(self._sound(answer, batch), batch)

    def _sound(self, trees: TreeBatch, batch: RequestBatch) -> TreeBatch:
        """The trees in host memory. Raises: they are no trees over this batch."""
        if not isinstance(trees, TreeBatch):
            raise TypeError(f"{type(trees).__name__} in the place of a TreeBatch")
        trees = on_host(trees)
        columns = (trees.node_start, trees.token_ids, trees.parents, trees.log_q, trees.source)
        _core.check_batch(*columns, batch.size, self.vocab_size)
        return trees

    def _chosen(
        self, budget: Budget, proposals: Sequence[TreeBatch], limits: DraftLimits, batch: RequestBatch
    ) -> StepPlan:
        """What the budget chose: nobody looks at it again before the target computes it."""
        plan = budget.choose(proposals, limits, batch, self._asking.ms)
        self._sound(plan.trees, batch)
        return sound_plan(plan)

    # --- after the forward pass --------------------------------------------------------------------------------------

    def observe(self, planned: PlannedStep | None, trees: TreeBatch, result: VerifyResult) -> None:
        """What became of a step; its time follows in `timed`, in the order of the steps.

        Args:
            planned: what `propose` made of it; None: nothing was planned for it.
            trees: what the target verified: all, or as much as the engine had room for.
        """
        made_from = () if planned is None else (planned.batch, planned.proposals)
        self._untimed.append(StepRecord(None if planned is None else planned.plan, trees, result, None, *made_from))
        if trees.num_nodes:
            for drafter in self.drafters:
                if getattr(type(drafter), "observe", None) is not BaseDrafter.observe:
                    self._drafter_does(drafter, lambda drafter: drafter.observe(trees, result))

    def timed(self, timing: StepTiming | None) -> None:
        """What the oldest step without a time cost (None: not known); budget and listeners learn of it now."""
        if not self._untimed:
            return
        over = self._untimed.popleft()
        self._asking.passed(timing)
        record = StepRecord(over.plan, over.trees, over.result, timing, over.batch, over.proposals)
        try:
            if id(self.budget) not in self.probation.out:
                self.budget.observe(record)
        except CONTAINED as error:
            self._budget_failed(error)
        self._tell(lambda listener: listener.stepped(record))

    def compared(self, checked: int, differing: int) -> None:
        """So many tokens of withheld verdicts were compared with plain decoding, and so many of them differed."""
        self._tell(lambda listener: listener.compared(checked, differing))

    def finish(self, ending: Answer) -> None:
        """A request is over; `forget` follows. Drafters hear of each; listeners of one that began or has a token."""
        for drafter in self._told:
            self._drafter_does(drafter, lambda drafter: drafter.finish(ending))
        if len(ending.token_ids):
            try:
                # also on probation: of a budget that comes back nothing is to be missing
                self.budget.finish(ending)
            except CONTAINED as error:
                self._budget_failed(error)
        if len(ending.token_ids) or ending.request_id in self._begun:
            self._begun.discard(ending.request_id)
            self._tell(lambda listener: listener.finished(ending))

    def forget(self, request_id: str) -> None:
        for drafter in self._told:
            self._drafter_does(drafter, lambda drafter: drafter.forget(request_id))

    def close(self) -> None:
        """Nothing more will come: what is still open is told as it is."""
        while self._untimed:
            self.timed(None)
        self._tell(lambda listener: listener.closed())
        self._close_drafters()

    # --- calls that may fail -----------------------------------------------------------------------------------------

    def _tell(self, what: Callable[[Listener], None]) -> None:
        """Tell all who watch; one that fails at it lacks what it was told."""
        for listener in self.listeners:
            try:
                what(listener)
            except CONTAINED as error:
                self.guard.failed("watching", error, _UNWATCHED)

    def _drafter_does(self, drafter: Drafter, what: Callable[[Drafter], T | None]) -> T | None:
        """None: it failed, and is on probation."""
        try:
            return what(drafter)
        except CONTAINED as error:
            self.failed(drafter, error)
            return None

    def _budget_does(self, what: Callable[[Budget], T]) -> T | None:
        """None: it failed, now or before, and is on probation."""
        try:
            return what(self.budget) if id(self.budget) not in self.probation.out else None
        except CONTAINED as error:
            self._budget_failed(error)
            return None
