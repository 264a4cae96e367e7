"""What only the scheduler knows, on its way to the worker: how requests ended, how many wait, which step it is."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_specrollout.types import Status

_Base = Scheduler if TYPE_CHECKING else object
_STATUS = {RequestStatus.FINISHED_STOPPED: Status.FINISHED, RequestStatus.FINISHED_LENGTH_CAPPED: Status.TRUNCATED}
_ATTRIBUTE = "spec_rollout_endings"
_WAITING = "spec_rollout_waiting"
_STEP = "spec_rollout_step"
# what vLLM appends to the name that a client knows, so that no two requests share one
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


class TellsEndings(_Base):
    """Mixed into vLLM's schedulers: the next step's schedule says how the requests that it removes have ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._endings: dict[str, tuple[int, Status]] = {}
        self._step = 0
        """Steps scheduled so far that compute anything: the clock that all pauses go by."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self._step += scheduler_output.total_num_scheduled_tokens > 0
        super()._update_after_schedule(scheduler_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.num_output_tokens:
            status = _STATUS.get(request.status, Status.ABORTED)
            self._endings[request.request_id] = (request.num_output_tokens, status)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        if output.finished_req_ids:
            ended = {
                name: end for name in output.finished_req_ids if (end := self._endings.pop(name, None)) is not None
            }
            setattr(output, _ATTRIBUTE, ended)
        setattr(output, _WAITING, len(self.waiting))
        setattr(output, _STEP, self._step)
        return output


def endings_of(scheduler_output: SchedulerOutput) -> dict[str, tuple[int, Status]]:
    """Requests that are over: internal name -> (number of tokens generated, how it ended)."""
    return getattr(scheduler_output, _ATTRIBUTE, {})


def waiting_of(scheduler_output: SchedulerOutput) -> int:
    """Requests that have no place in the batch yet."""
    return getattr(scheduler_output, _WAITING, 0)


def step_of(scheduler_output: SchedulerOutput) -> int:
    """The number of the engine step, from 1 on."""
    return getattr(scheduler_output, _STEP, 0)


@functools.lru_cache(maxsize=65_536)
def external_name(request_id: str) -> str:
    """The name under which a client knows a request (with `index_` before it for samples of `n > 1`)."""
    return request_id if vllm.envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else _RANDOM_SUFFIX.sub("", request_id)
