"""vLLM's schedulers, with drafts: what is mixed into them, and what travels between them and the workers.

What belongs here: all that a scheduler does for us on both runners, in the order of its step. Waiting requests are put
into order, drafts are cut to what plain decoding has no use for, the schedule says what only the scheduler knows, and
what workers counted goes on to the frontend. What only V2 needs is in v2/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_specrollout.config.marking import mark_of
from vllm_specrollout.observe.metrics import encode
from vllm_specrollout.patches import features
from vllm_specrollout.scheduling.longest_first import Queue, Waiting
from vllm_specrollout.scheduling.lookahead import DraftAsk, granted
from vllm_specrollout.scheduling.stop_strings import answers
from vllm_specrollout.types import FinishReason
from vllm_specrollout.worker.arriving import Arrivals, mark
from vllm_specrollout.worker.common import REQUEST_METRICS_KEY, config_of, with_speculation
from vllm_specrollout.worker.hidden import WantedRows, drop, tell_dropped, turn, wanted_rows

_Base = Scheduler if TYPE_CHECKING else object
logger = init_logger("vllm.specrollout")


class DraftedMetrics(RequestSpecDecodeMetrics):
    """vLLM's, of steps with drafts alone: on the V2 runner there may be room that stays empty."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


_STATUS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.FINISHED,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.TRUNCATED,
}
_ANY = 1 << 30  # draft tokens; more than any request has
_ENDINGS, _WAITING, _STEP = "spec_rollout_endings", "spec_rollout_waiting", "spec_rollout_step"
_SIGNALLED, _WANTED, _JUDGED = "spec_rollout_signalled", "spec_rollout_wanted", "spec_rollout_judged"


@dataclass(frozen=True)
class DraftReport:
    """V2 runner: what the worker tells the scheduler of its drafting."""

    # number of the engine step before which the worker would leave all room empty, so there need not be any
    asks_at: int = 0
    # request id -> most placeholders it can use; absent: no limit of its own
    limits: dict[str, int] = field(default_factory=dict)
    # request id -> nodes drafted in the step that this output is of
    drafted: dict[str, int] = field(default_factory=dict)
    # most placeholders that any request can use
    most: int = _ANY


@dataclass
class SpecRolloutOutput(ModelRunnerOutput):
    """A step's output with news for the scheduler on board: no second call to the workers is needed to fetch them."""

    # V1 runner: the next step's drafts
    drafts: DraftTokenIds | None = None
    report: DraftReport | None = None
    # what the worker counted since its last output: see vllm_specrollout.observe.metrics
    counts: dict[str, int] = field(default_factory=dict)
    # as `judged_of`
    judged: tuple[int, bool] | None = None

    @classmethod
    def carrying(
        cls,
        output: ModelRunnerOutput,
        drafts: DraftTokenIds | None = None,
        report: DraftReport | None = None,
        counts: dict[str, int] | None = None,
        judged: tuple[int, bool] | None = None,
    ) -> SpecRolloutOutput:
        made = object.__new__(cls)
        made.__dict__.update(vars(output), drafts=drafts, report=report, counts=counts or {}, judged=judged)
        return made


def endings_of(scheduler_output: SchedulerOutput) -> dict[str, tuple[int, FinishReason]]:
    """Requests that are over: internal name -> (number of tokens generated, how it ended)."""
    return getattr(scheduler_output, _ENDINGS, {})


def waiting_of(scheduler_output: SchedulerOutput) -> int:
    """Requests that have no place in the batch yet."""
    return getattr(scheduler_output, _WAITING, 0)


def step_of(scheduler_output: SchedulerOutput) -> int:
    """The number of the engine step, from 1 on."""
    return getattr(scheduler_output, _STEP, 0)


def wanted_of(scheduler_output: SchedulerOutput) -> dict[str, WantedRows] | None:
    """What the step computes of marked requests; None: none are there."""
    return getattr(scheduler_output, _WANTED, None)


def judged_of(scheduler_output: SchedulerOutput) -> tuple[int, bool] | None:
    """Number of a head whose probation is over, and whether it stays: the first rank found it, and all switch before
    this step; None: there is none."""
    return getattr(scheduler_output, _JUDGED, None)


def is_signalled(scheduler_output: SchedulerOutput) -> bool:
    """Whether weights may have been written since the last step.

    Trainers that write them in place call nothing of vLLM's that brings weights. But they let the old keys and values
    be forgotten, or stop the engine, or wait until no request runs.
    """
    num_new = len(scheduler_output.scheduled_new_reqs)
    return getattr(scheduler_output, _SIGNALLED, False) or 0 < num_new == len(scheduler_output.num_scheduled_tokens)


class SchedulerMixin(_Base):
    """What both runners' schedulers share.

    The queue stays vLLM's own; before places are given, it is put into order. Nothing is reordered where requests have
    priorities, or while no answer's length is known.
    """

    # slots that the next step's tokens will need before it is known what became of this one's
    slots_ahead = 0

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        self.max_draft_tokens = config.max_draft_tokens
        self.spec_decode_metrics_level = vllm_config.additional_config.get(REQUEST_METRICS_KEY, "none")
        # requests that may run at once
        self.places: int = getattr(self, features.installed().places_field)
        # The grammar bitmasks need a row per draft token.
        self.structured_output_manager.vllm_config = with_speculation(vllm_config, self.max_draft_tokens)
        tokenizer = getattr(self.structured_output_manager, "tokenizer", None)
        self._arrivals = Arrivals(vllm_config, grammar_end=getattr(tokenizer, "eos_token_id", None))
        is_wanted = config.queue_order == "longest_first"
        self._queue = Queue() if is_wanted and self.policy is SchedulingPolicy.FCFS else None
        # False: lengths are remembered all the same
        self.is_reordering = True
        # waiting or running request -> what the policy knows of it
        self._known: dict[str, Waiting] = {}
        self._arrived = 0
        self._endings: dict[str, tuple[int, FinishReason]] = {}
        # while requests are taken back: those whose answers ended at a stop string -> tokens of the answer
        self._answers: dict[str, int] = {}
        # waiting or running requests of which more parts may come
        self._sessions: set[str] = set()
        self._step = 0
        """Steps scheduled so far that compute anything: the clock that all pauses go by."""
        self._counts: dict[str, int] | None = None
        self._judged: tuple[int, bool] | None = None
        self._is_signalled = False
        self.prefill_tokens = config.train.prefill_tokens
        # requests whose hidden states are wanted -> their marks; and those that made way, of which nobody was told yet
        self.marked: dict[str, Mapping[str, int]] = {}
        self.dropped: list[Request] = []

    # --- the step ----------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._queue is not None and self.is_reordering and self.waiting:
            places = self.places - len(self.running)
            if self._queue.is_due(len(self.waiting), places):
                self._put_in_order(self._queue)
        self._cut_drafts()
        if self.marked:
            output = turn(self, partial(super().schedule, *args, **kwargs))
        else:
            output = super().schedule(*args, **kwargs)
        if output.finished_req_ids:
            ended = {
                name: end for name in output.finished_req_ids if (end := self._endings.pop(name, None)) is not None
            }
            setattr(output, _ENDINGS, ended)
        if output.scheduled_new_reqs:
            mark(output, self.requests)
        if self.marked:
            setattr(output, _WANTED, wanted_rows(self, output))
        setattr(output, _WAITING, len(self.waiting))
        setattr(output, _STEP, self._step)
        if self._judged is not None:
            setattr(output, _JUDGED, self._judged)
            self._judged = None
        if self._is_signalled and output.total_num_scheduled_tokens:
            self._is_signalled = False
            setattr(output, _SIGNALLED, True)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self._step += scheduler_output.total_num_scheduled_tokens > 0
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, SpecRolloutOutput):
            self._counts = model_runner_output.counts
            self._judged = model_runner_output.judged or self._judged
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.dropped:
            tell_dropped(self, outputs)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's, with our counts on board.

        A table of numbers that vLLM leaves open carries them under names of our own, so nothing of the message between
        the processes has to change; the front end takes them out before vLLM's own loggers look.
        """
        stats = super().make_stats(*args, **kwargs)
        counts, self._counts = self._counts, None
        if stats is not None and counts:
            getattr(stats, features.installed().counts_field).update(encode(counts))
        return stats

    # --- requests that come and go -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if (mark := mark_of(request.sampling_params)) is not None:
            self.marked[request.request_id] = mark
            return super().add_request(request)
        session = self.requests.get(request.request_id)  # streaming input comes under its session's name
        problem_id = self._arrivals.add(request, session).problem_id
        super().add_request(request)
        if session is None and request.resumable:
            self._sessions.add(request.request_id)
        if request.spec_decode_metrics is not None:
            # vLLM's own has a place for as many accepted tokens as its `speculative_config` says: none
            request.spec_decode_metrics = DraftedMetrics.new(self.max_draft_tokens)
        if self._queue is None or session is not None:
            return
        if len(self.waiting) <= 1:
            self._arrived = 0
        self._known[request.request_id] = Waiting(
            problem_id, request.max_tokens, self._arrived, num_prompt=request.num_prompt_tokens
        )
        self._arrived += 1
        self._queue.arrive()

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(request_ids, (list, tuple)):
            self._answers = answers(request_ids, self.requests)
        try:
            return super().finish_requests(request_ids, *args, **kwargs)
        finally:
            self._answers = {}

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._arrivals.end(request.request_id)
        self._sessions.discard(request.request_id)
        if self.marked.pop(request.request_id, None) is not None:
            return super()._free_request(request, *args, **kwargs)
        known = self._known.pop(request.request_id, None)
        status, num_tokens = _STATUS.get(request.status, FinishReason.ABORTED), request.num_output_tokens
        if (length := self._answers.get(request.request_id)) is not None:
            # by now there may be more of it
            status, num_tokens = FinishReason.FINISHED, min(length, num_tokens)
        if known is not None and self._queue is not None and status is not FinishReason.ABORTED:
            self._queue.observe(known.problem_id, num_tokens)
        self._endings[request.request_id] = (num_tokens, status)
        return super()._free_request(request, *args, **kwargs)

    # --- what trainers do to the engine ------------------------------------------------------------------------------

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._is_signalled = True
        if self.marked:
            drop(self)
        return super().reset_prefix_cache(*args, **kwargs)

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        self._is_signalled = True
        if self.marked:
            drop(self)
        super().set_pause_state(*args, **kwargs)

    # --- the order of the queue --------------------------------------------------------------------------------------

    def _put_in_order(self, queue: Queue) -> None:
        waiting = self.waiting
        assert isinstance(waiting, FCFSRequestQueue)
        requests = list(waiting)
        known = [self._as_waiting(request) for request in requests]
        everybody = [*known, *(self._as_waiting(request) for request in self.running)]
        # one block is vLLM's, to point at where there is none
        kinds = len(self.kv_cache_manager.coordinator.single_type_managers)
        capacity = (self.kv_cache_manager.block_pool.num_gpu_blocks - 1) // kinds * self.block_size
        is_longest_first = queue.can_be_longest_first(everybody, self.places, capacity, self.block_size)
        order = queue.order(known, is_longest_first)
        if order == list(range(len(requests))):
            return
        if is_longest_first:
            logger.info_once(
                "Spec rollout: waiting requests get their places longest first, by earlier answers' lengths"
            )
        waiting.clear()
        waiting.extend(requests[index] for index in order)

    def _as_waiting(self, request: Request) -> Waiting:
        known = self._known.get(request.request_id, Waiting("", request.max_tokens, 0, True))
        generated = request.num_output_tokens
        if generated > 0 or request.status is RequestStatus.PREEMPTED or known.is_preempted:
            return replace(known, is_preempted=True, generated=generated)
        return known

    # --- room in the KV cache ----------------------------------------------------------------------------------------

    def _cut_drafts(self) -> None:
        """Drafts give way: they are cut to what plain decoding has no use for.

        vLLM's scheduler preempts a request when the KV cache has no block left for another one, and draft tokens ask
        for blocks like any other. Any first part of a draft is a good draft, so cutting costs speed, never tokens.
        """
        if not any([request.spec_token_ids for request in self.running]):
            return
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        managers = self.kv_cache_manager.coordinator.single_type_managers
        block_size = min([manager.block_size for manager in managers])
        # requests with drafts, and how many of those fit into blocks that plain decoding takes anyway
        drafted: list[tuple[Request, int]] = []
        for request in self.running:
            needed = request.num_tokens + request.num_output_placeholders
            slack = _ANY
            for manager in managers:
                owned = len(manager.req_to_blocks.get(request.request_id, ()))
                # what plain decoding takes, of every kind of block
                taken = max(owned, -(-needed // manager.block_size))
                free -= taken - owned
                slack = min(slack, taken * manager.block_size - needed)
            if request.spec_token_ids:
                drafted.append((request, max(slack - self.slots_ahead, 0)))
        # who waits would take what is free; and each running request may need another block soon
        is_short = bool(self.waiting) and len(self.running) < self.places
        spare = 0 if is_short else free - len(self.running) * len(managers)
        if spare >= len(managers) * sum([-(-len(request.spec_token_ids) // block_size) for request, _ in drafted]):
            return  # there is room for all of them, whatever slack they have
        asks = [DraftAsk(len(request.spec_token_ids), slack) for request, slack in drafted]
        for (request, _), most in zip(drafted, granted(asks, spare, block_size, len(managers)), strict=True):
            if most < len(request.spec_token_ids):
                request.spec_token_ids = request.spec_token_ids[:most]


class SpecRolloutScheduler(SchedulerMixin, Scheduler):
    """V1: adds draft tokens to the requests they were made for; all else is stock.

    Stock code schedules whatever draft tokens a request carries, so it need not be told that drafts exist. It must not:
    with `num_spec_tokens` set it pads new requests with placeholder drafts, for the sake of GPU graphs.
    """

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, SpecRolloutOutput) and model_runner_output.drafts is not None:
            self.update_draft_token_ids(model_runner_output.drafts)
            for name in self._sessions:
                request = self.requests[name]
                if request.status is not RequestStatus.RUNNING:
                    request.spec_token_ids = []  # of a part that is over
        return outputs

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, num_draft_tokens: int, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        if spec_decoding_stats is None and self.log_stats and num_draft_tokens:
            spec_decoding_stats = SpecDecodingStats.new(self.max_draft_tokens)
        return super().make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, *args, **kwargs)
