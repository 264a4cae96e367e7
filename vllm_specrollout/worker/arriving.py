"""What is settled of a request when it arrives in the scheduler, and how the workers learn of it.

What belongs here: seeds for those without one, and whose answer a request's is. Both go by the order of arrival, which
neither drafts nor the order of the queue change, and which is the same on all ranks that schedule for themselves. A
seed decides tokens, so whatever happens it is drawn. A problem decides drafts alone, so a failure leaves it open.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_specrollout.config import parse_request
from vllm_specrollout.guard import Guard
from vllm_specrollout.history.problems import Attribution, Problems
from vllm_specrollout.worker.resuming import take_up
from vllm_specrollout.worker.seeds import RequestSeeds

_KEY = "spec_rollout_arrival"  # in `extra_args`: they travel with the request to every worker, whichever runs it
_GREEDY = 1e-5  # below this temperature vLLM samples greedily


class Arrivals:
    """One scheduler's."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._seeds = RequestSeeds.of(vllm_config)
        self._has_connector = vllm_config.kv_transfer_config is not None
        self._problems = Problems()
        self._guard = Guard()

    def add(self, request: Request, session: Request | None = None) -> Attribution:
        """Called once per request, before anything else is done with it.

        Args:
            session: the running request of that name, which this one brings more of its prompt for (vLLM's streaming
                input). Of this one vLLM keeps the new tokens and the parameters, so all else stays the session's.
        """
        if session is None:
            take_up(request, has_connector=self._has_connector)
        params = request.sampling_params
        if params is None:
            return Attribution("")
        found = self._attributed(request, params) if session is None else _of_session(session)
        # a copy: the front end has this one, and other requests may have it too
        request.sampling_params = own = copy.copy(params)
        is_unseeded = params.seed is None and params.temperature >= _GREEDY
        if is_unseeded:
            own.seed = self._seeds.draw()
        told = {"problem_id": found.problem_id, "continues": found.continues, "is_unseeded": is_unseeded}
        own.extra_args = {**(params.extra_args or {}), _KEY: told}
        return found

    def _attributed(self, request: Request, params: SamplingParams) -> Attribution:
        given = parse_request((params.extra_args or {}).get("spec_rollout")).problem_id
        with self._guard.over("finding a request's problem", "drafts from its history may be missing"):
            return self._problems.arrive(
                request.request_id,
                request.prompt_token_ids,
                request._output_token_ids,  # the list itself: it grows
                given=given,
                session_id=request.session_id,
                salt=request.cache_salt or "",
                adapter=request.lora_request.lora_name if request.lora_request is not None else "",
            )
        return Attribution(given)

    def end(self, request_id: str) -> None:
        """The request is over, however it ended."""
        with self._guard.over("finding a request's problem", "drafts from its history may be missing"):
            self._problems.end(request_id)


def _of_session(session: Request) -> Attribution:
    """Its next part is of the same problem, and goes on from what was answered to the last one."""
    found = attribution_of(session.sampling_params) if session.sampling_params is not None else None
    return Attribution(found.problem_id if found is not None else "", continues=True)


def attribution_of(params: SamplingParams) -> Attribution | None:
    """Whose answer the request's is; None: it came past our scheduler."""
    told = _told(params)
    return Attribution(told["problem_id"], told["continues"]) if told else None


def is_unseeded(params: SamplingParams) -> bool:
    """Whether the request came without a seed, and was given one here."""
    return bool(_told(params).get("is_unseeded"))


def _told(params: SamplingParams) -> Mapping[str, Any]:
    return (params.extra_args or {}).get(_KEY) or {}
