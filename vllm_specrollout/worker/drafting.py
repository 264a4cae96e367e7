"""The drafts of one engine, between the step that plans them and the step that verifies them. Both runners use it.

What belongs here: who drafts where there are several ranks, what a request is called between them, whether a verdict
is one that can be, and that nothing of it stops a step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_specrollout import _core
from vllm_specrollout.history.vocabulary import ANY_TOKEN
from vllm_specrollout.observe.guard import CONTAINED
from vllm_specrollout.speculator import PlannedStep, Speculator
from vllm_specrollout.trees.batch import chains, cut, joined, take, token_lists
from vllm_specrollout.types import IntArray, RequestBatch, RequestView, StepTiming, TreeBatch, VerifyResult, empty_trees
from vllm_specrollout.worker.scheduler import is_signalled
from vllm_specrollout.worker.weights_version import WeightsVersion
from vllm_specrollout.worker.withheld import SELF_CHECK, SelfCheckError, Withheld

NO_DRAFTS = empty_trees([])


def begin_step(version: WeightsVersion, scheduler_output: Any) -> None:
    """A step begins, which the runner says before it computes: a change of the weights is over.

    One that computes nothing ends none. It is no method there, so that a step passes one file less.
    """
    for new in scheduler_output.scheduled_new_reqs:
        if new.lora_request is not None and version.adapters.asked_for(new.lora_request):
            version.touch()
    if scheduler_output.total_num_scheduled_tokens and (version.may_differ or is_signalled(scheduler_output)):
        version.close()


@dataclass(frozen=True, slots=True)
class Withholding:
    """Told to the other ranks before the trees: whose verdict is withheld in their step."""

    request_id: str


class Drafting:
    """Plans steps, and tells the speculator what became of them.

    Args:
        num_ranks: tensor-parallel ranks. The first one drafts: clocks differ between ranks, and a tree must not. It
            tells the others whatever happens, since they wait for it.
        is_apart: each rank has a scheduler of its own, in a process of its own (vLLM's external launchers). They do the
            same with the same requests, but vLLM ends a request's name in random characters: so between ranks it is
            called by its number, counted in the order of admission.
    """

    def __init__(self, speculator: Speculator, num_ranks: int = 1, *, is_apart: bool = False) -> None:
        self.speculator = speculator
        self.weights_version = WeightsVersion()
        self.is_apart = is_apart and num_ranks > 1
        self._count = itertools.count()
        # of the requests that run; empty where all ranks know them by one name
        self._numbers: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self.group: Any = get_tp_group() if num_ranks > 1 else None
        self.is_drafting = self.group is None or self.group.rank_in_group == 0
        # what was planned last; None: nothing, or another rank plans
        self.planned: PlannedStep | None = None
        self.vocab_size = ANY_TOKEN
        self.withheld = Withheld(speculator.guard, self._stop, self._compared)
        self.withholding = ""
        """The request whose verdict is withheld in the step that was planned last; empty: nobody's."""
        self.ms = 0.0
        """Milliseconds that the last step's drafts took to be made."""
        self.follow: Callable[[Any], None] = lambda order: None
        """What the other ranks do when the first one has something else to tell them before its trees."""
        self.last_order: Callable[[], Any] = lambda: None
        """On the first rank: what else is told before the trees; None: nothing."""

    @classmethod
    def of(cls, speculator: Speculator, parallel_config: Any, *, is_checking: bool = True) -> Drafting:
        """That of an engine with this vLLM configuration.

        Args:
            is_checking: whether what comes of drafts is checked.
        """
        backend = parallel_config.distributed_executor_backend
        made = cls(speculator, parallel_config.tensor_parallel_size, is_apart=backend == "external_launcher")
        made.vocab_size = speculator.vocab_size
        if not (is_checking and made.is_drafting):
            made.withheld.end()
        return made

    def admit(self, view: RequestView) -> None:
        """A request that may be drafted for has come."""
        if self.is_apart and view.request_id not in self._numbers:
            number = self._numbers[view.request_id] = str(next(self._count))
            self._names[number] = view.request_id
        view.weights_version = self.weights_version.number
        if self.is_drafting:
            try:
                self.speculator.admit(view)
            except CONTAINED as error:
                self.speculator.guard.failed("admitting", error, "a request may go without drafts")

    def forget(self, request_id: str) -> None:
        """It is over, or it was preempted."""
        if (number := self._numbers.pop(request_id, None)) is not None:
            del self._names[number]
        self.withheld.drop(request_id)
        self.speculator.forget(request_id)

    def begin(self, view: RequestView) -> None:
        """Its first token is known."""
        if self.is_drafting:
            self.speculator.begin(view)

    def is_paused(self, step: int, num_requests: int) -> bool:
        """Whether this engine step goes without drafts, as far as this rank knows."""
        return not self.is_drafting or self.speculator.is_paused(step, num_requests)

    def steps_off(self, step: int, num_requests: int) -> int:
        """For how many steps from this one on a scheduler may count on no drafts.

        Pauses go by the first rank's clock: where each rank schedules for itself, none is counted on.
        """
        return 0 if self.is_apart else self.speculator.steps_off(step, num_requests)

    def plan(
        self,
        see: Callable[[], RequestBatch | None],
        step: int,
        fit: Callable[[TreeBatch, RequestBatch], TreeBatch] | None = None,
    ) -> TreeBatch:
        """Trees for the engine step `step`, over the requests that were drafted for.

        Args:
            see: the requests that may be drafted for; None where there is none, or drafting is paused.
            fit: cuts the trees to what the runner has room for.
        """
        begin = time.perf_counter()
        trees, self.planned, self.withholding = NO_DRAFTS, None, ""
        withheld = self.withheld
        if self.is_drafting:
            try:
                batch = see()
                if batch is not None and batch.size:
                    if withheld.held or not withheld.may_branch:
                        withheld.narrow(batch)
                    self.planned = self.speculator.propose(batch, step)
                    # whatever a budget says, no request gets more than there is room for
                    chosen = cut(self.planned.plan.trees, batch.max_nodes)
                    trees = fit(chosen, batch) if fit is not None and chosen.num_nodes else chosen
                    if withheld.drafted >= withheld.due and trees.num_nodes:
                        self.withholding = withheld.choose(trees)
            except CONTAINED as error:
                self.speculator.guard.failed("drafting", error, "requests go on without drafts in such a step")
        if self.group is not None:
            trees = self._agreed(trees)
        self.ms = (time.perf_counter() - begin) * 1e3 if self.planned is not None else 0.0
        return trees

    def look_ahead(self, batch: RequestBatch, step: int) -> PlannedStep | None:
        """What the first rank would verify of these requests' drafts; for steps to come, of which others decide.

        None: nothing is planned. A step that was under way when a pause was decided on says nothing more of it.
        """
        if not self.is_drafting or not batch.size or self.speculator.steps_off(step, batch.size):
            return None
        try:
            self.withheld.narrow(batch)
            return self.speculator.propose(batch, step)
        except CONTAINED as error:
            self.speculator.guard.failed("drafting", error, "such steps go by what was planned before")
            return None

    def order(self, order: Any) -> None:
        """Have the other ranks follow; called on the first one, while it plans."""
        if self.group is not None and self.is_drafting:
            self.group.broadcast_object(order, src=0)

    def _agreed(self, trees: TreeBatch) -> TreeBatch:
        """The first rank's trees; until they come, the others follow its orders.

        What cannot be told fails before anything of it is sent, so the others are told that there are none.
        """
        if self.is_drafting:
            try:
                if (order := self.last_order()) is not None:
                    self.order(order)
                if self.withholding:
                    self.order(Withholding(*self.numbered([self.withholding])))
                self.group.broadcast_object(self._called(trees, self.numbered), src=0)
            except CONTAINED as error:
                self.group.broadcast_object(NO_DRAFTS, src=0)
                self.speculator.guard.failed("drafting", error, "requests go on without drafts in such a step")
                self.withholding = ""
                return NO_DRAFTS
            return trees
        while not isinstance(told := self.group.broadcast_object(None, src=0), TreeBatch):
            if isinstance(told, Withholding):
                (self.withholding,) = self.named([told.request_id])
            else:
                self.follow(told)
        return self._called(told, self.named)

    def _called(self, trees: TreeBatch, by: Callable[[Sequence[str]], list[str]]) -> TreeBatch:
        return replace(trees, request_ids=by(trees.request_ids)) if self.is_apart else trees

    def numbered(self, request_ids: Sequence[str]) -> list[str]:
        """What requests are called between ranks."""
        return [self._numbers[name] for name in request_ids] if self.is_apart else list(request_ids)

    def named(self, called: Sequence[str]) -> list[str]:
        """Their names on this rank."""
        return [self._names[number] for number in called] if self.is_apart else list(called)

    def observe(
        self, planned: PlannedStep | None, trees: TreeBatch, num_accepted: IntArray, accepted: IntArray
    ) -> None:
        """What became of a step's trees.

        Args:
            planned: what `plan` left in `planned` for that step.
            trees: over the step's requests, in the batch's order.
            num_accepted, accepted: as in `VerifyResult`.
        """
        if self.is_drafting:
            if trees.num_nodes:
                self.withheld.drafted += int(np.count_nonzero(trees.sizes))
            try:
                self.speculator.observe(planned, trees, VerifyResult(num_accepted, accepted))
            except CONTAINED as error:
                effect = "what became of such a step's drafts is not learned from"
                self.speculator.guard.failed("learning", error, effect)

    def followed(self, trees: TreeBatch, sampled: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """The accepted nodes behind sampled tokens, as in `VerifyResult`; nothing is drafted any more where there are
        none that could be.

        Args:
            trees: over the step's requests.
            sampled: [R, width] tokens of each request, as many as `counts` [R] says.
        """
        # the last token of each request is the target's own
        drafted = np.maximum(counts - 1, 0).astype(np.int32)
        num_accepted, accepted = _core.follow(
            trees.node_start, trees.parents, trees.token_ids, np.ascontiguousarray(sampled, dtype=np.int32), drafted
        )
        if self.withheld.is_on:
            # those before the last are drafted tokens, which were looked at when they were proposed
            is_wrong = (num_accepted != drafted) | (counts < (trees.sizes > 0))
            if not is_wrong.any():
                last = sampled[np.arange(len(drafted)), drafted]
                is_wrong = (counts > 0) & ((last < 0) | (last >= self.vocab_size))
            if is_wrong.any():
                self._impossible(trees, sampled, counts, int(is_wrong.argmax()))
        return num_accepted, accepted

    def _impossible(self, trees: TreeBatch, sampled: IntArray, counts: IntArray, request: int) -> None:
        tree = trees.tree(request)
        cause = (
            f"request {trees.request_ids[request]}: {int(counts[request])} tokens of {sampled[request].tolist()} are no"
            f" path through the draft {tree.token_ids.tolist()} with parents {tree.parents.tolist()} and one more token"
            f" of a vocabulary of {self.vocab_size}"
        )
        self.speculator.guard.failed(SELF_CHECK, SelfCheckError(cause), self.withheld.give_up(), is_last=True)

    def _stop(self) -> None:
        self.speculator.stopped = SELF_CHECK

    def _compared(self, checked: int, differing: int) -> None:
        self.speculator.compared(checked, differing)

    def timed(self, timing: StepTiming | None) -> None:
        """What the oldest step without a time cost."""
        if self.is_drafting:
            try:
                self.speculator.timed(timing)
            except CONTAINED as error:
                self.speculator.guard.failed("learning", error, "what such a step cost is not learned from")


def drafted_tokens(trees: TreeBatch) -> tuple[list[str], list[list[int]]]:
    """The requests that have a draft, and its tokens, as vLLM's scheduler takes them."""
    drafted = [(name, own) for name, own in zip(trees.request_ids, token_lists(trees), strict=True) if own]
    return [name for name, _ in drafted], [own for _, own in drafted]


def scheduled_trees(planned: TreeBatch, request_ids: Sequence[str], scheduled: Mapping[str, list[int]]) -> TreeBatch:
    """The trees behind the draft tokens that the scheduler put into a step, in batch order.

    It may have cut drafts to their first tokens, and left some out. Tokens that no tree is known for are a chain:
    lossless anyway.
    """
    own = [scheduled.get(request_id, []) for request_id in request_ids]
    if planned.request_ids == request_ids and own == token_lists(planned):
        return planned
    counts = np.fromiter(map(len, own), np.int32, len(own))
    place = {name: i for i, name in enumerate(planned.request_ids)}
    index = np.fromiter((place.get(name, -1) for name in request_ids), np.int64, len(own))
    if len(place):
        is_known = (index >= 0) & (counts <= planned.sizes[index])
    else:
        planned, is_known = empty_trees(["none"]), counts == 0
    trees = take(planned, request_ids, np.where(is_known, index, 0), np.where(is_known, counts, 0).astype(np.int32))
    if bool(is_known.all()) and trees.token_ids.tolist() == [token for tokens in own for token in tokens]:
        return trees
    is_same = [a == list(b) for a, b in zip(token_lists(trees), own, strict=True)]
    return joined(trees, chains(request_ids, own), ~np.asarray(is_same, dtype=np.bool_))
