"""Which of the waiting requests gets the next place: the scheduler's queue, put into the order that a policy says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_specrollout.config import parse_request
from vllm_specrollout.scheduling.longest_first import Queue, Waiting
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
        self._known[request.request_id] = Waiting(
            problem_id, request.max_tokens, self._arrived, num_prompt=request.num_prompt_tokens
        )
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
        known = [self._as_waiting(request) for request in requests]
        everybody = [*known, *(self._as_waiting(request) for request in self.running)]
        is_longest_first = queue.can_be_longest_first(
            everybody, self.max_num_active_reqs, self._capacity(), self.block_size
        )
        order = queue.order(known, is_longest_first)
        if order == list(range(len(requests))):
            return
        if is_longest_first:
            logger.info_once(
                "Spec rollout: waiting requests get their places longest first, by earlier answers' lengths"
            )
        waiting.clear()
        waiting.extend(requests[index] for index in order)

    def _capacity(self) -> int:
        """Tokens that the KV cache holds; one block is vLLM's, to point at where there is none."""
        kinds = len(self.kv_cache_manager.coordinator.single_type_managers)
        return (self.kv_cache_manager.block_pool.num_gpu_blocks - 1) // kinds * self.block_size

    def _as_waiting(self, request: Request) -> Waiting:
        known = self._known.get(request.request_id, Waiting("", request.max_tokens, 0, True))
        generated = request.num_output_tokens
        is_preempted = generated > 0 or request.status is RequestStatus.PREEMPTED or known.is_preempted
        if not is_preempted:
            return known
        return dataclasses.replace(known, is_preempted=True, generated=generated)
