"""Which of the waiting requests gets the next place: the scheduler's queue, put into the order that a policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_specrollout.config import parse_request
from vllm_specrollout.policies.queue import Queue, Waiting
from vllm_specrollout.worker.admission import prompt_hash
from vllm_specrollout.worker.common import config_of

logger = init_logger(__name__)

_Base = Scheduler if TYPE_CHECKING else object
_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class OrdersQueue(_Base):
    """Mixed into vLLM's schedulers. The queue stays vLLM's own; before places are given, it is put into order.

    Nothing is reordered where requests have priorities, or while no answer's length is known.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        is_wanted = config_of(vllm_config).queue_order == "longest_first"
        self._queue = Queue() if is_wanted and self.policy is SchedulingPolicy.FCFS else None
        # False: lengths are remembered all the same
        self.is_reordering = True
        # waiting or running request -> what the policy knows of it
        self._known: dict[str, Waiting] = {}
        self._arrived = 0

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self._queue is None:
            return
        if len(self.waiting) <= 1:
            self._arrived = 0
        params = request.sampling_params
        options = parse_request(((params and params.extra_args) or {}).get("spec_rollout"))
        problem_id = options.problem_id or prompt_hash(request.prompt_token_ids)
        self._known[request.request_id] = Waiting(problem_id, request.max_tokens, self._arrived)
        self._arrived += 1
        self._queue.arrive()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        known = self._known.pop(request.request_id, None)
        if known is not None and self._queue is not None and request.status in _ENDS:
            self._queue.observe(known.problem_id, request.num_output_tokens)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._queue is not None and self.is_reordering:
            places = self.max_num_active_reqs - len(self.running)
            if self._queue.is_due(len(self.waiting), places):
                self._put_in_order(self._queue)
        return super().schedule(*args, **kwargs)

    def _put_in_order(self, queue: Queue) -> None:
        waiting = self.waiting
        assert isinstance(waiting, FCFSRequestQueue)
        requests = list(waiting)
        order = queue.order([self._as_waiting(request) for request in requests])
        if order == list(range(len(requests))):
            return
        logger.info_once("Spec rollout: waiting requests get their places longest first, by earlier answers' lengths")
        waiting.clear()
        waiting.extend(requests[index] for index in order)

    def _as_waiting(self, request: Request) -> Waiting:
        known = self._known.get(request.request_id)
        is_preempted = request.num_output_tokens > 0 or request.status is RequestStatus.PREEMPTED
        if known is None or is_preempted:
            return Waiting("", request.max_tokens, 0, is_preempted)
        return known
