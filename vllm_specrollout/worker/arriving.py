"""Arrival of a request: its seed, whose answer it is, and how an interrupted answer is taken up.

Seeds and attribution go by the order of arrival, which neither drafts nor the order of the queue change, and which is
the same on all ranks that schedule for themselves. A seed decides tokens, so whatever happens it is drawn: here, never
from the process's own random states, which are a trainer's. A problem decides drafts alone: a failure leaves it open.
An interrupted answer comes back as a request that the engine preempted itself: so the scheduler keeps it, and so does
the V1 runner. The V2 runner takes preempted requests as new ones with a longer prefill, so it needs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_specrollout.config import parse_request
from vllm_specrollout.history.problems import Attribution, Problems
from vllm_specrollout.observe.guard import Guard

_SEEDS = 1 << 62


class RequestSeeds:
    """One engine's source of seeds. Requests get theirs in the order of their arrival (arriving.py).

    Tensor-parallel ranks that schedule for themselves are given the same requests in the same order, so they agree on
    every seed. Engines of a data-parallel group draw different ones: samples of one problem may be spread over them.
    """

    def __init__(self, engine_seed: int, data_parallel_rank: int = 0) -> None:
        entropy = [engine_seed % (1 << 64), data_parallel_rank]
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> RequestSeeds:
        """The source that an engine's configuration stands for."""
        return cls(vllm_config.model_config.seed or 0, vllm_config.parallel_config.data_parallel_rank)

    def draw(self) -> int:
        """The next request's seed, at least 0 and below 2**62."""
        return int(self._rng.integers(0, _SEEDS))


def signed(seed: int) -> int:
    """The same 64 bits, for a table of signed integers: sample i of `n` has the seed + i, which may be one too large.

    Called where the seed is used: in a copy of the parameters that travels, -1 would say that there is none.
    """
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


_RESUMED = "spec_rollout_resumed"


def take_up(request: Request, *, has_connector: bool = False) -> None:
    """Make the scheduler's request what it was when it was interrupted: the tokens behind the prompt are output.

    Args:
        has_connector: keys and values may come from elsewhere, too: of the prompt alone.
    """
    params = request.sampling_params
    resume = parse_request(((params and params.extra_args) or {}).get("spec_rollout")).resume
    if params is None or resume is None or request.prompt_token_ids is None:
        return
    answer = request.prompt_token_ids[resume.prompt_tokens :]
    # new objects: the front end has the old ones
    request.prompt_token_ids = request.prompt_token_ids[: resume.prompt_tokens]
    request.num_prompt_tokens = resume.prompt_tokens
    request._output_token_ids.extend(answer)
    request.sampling_params = params = copy.copy(params)
    # the client's limits are of what is still to come
    params.max_tokens = request.max_tokens = request.max_tokens + len(answer)
    if params.min_tokens:
        params.min_tokens += len(answer)
    # vLLM counts cached tokens of a prompt there, and holds that they are no more than it has
    request.prefill_stats = None
    # a connector takes what is cached here from the prompt's length, and may find that less than nothing is left
    request.skip_reading_prefix_cache |= has_connector


def mark(output: SchedulerOutput, requests: dict[str, Request]) -> None:
    """Tell the workers which new requests were begun elsewhere, and their tokens."""
    resumed = []
    for new in output.scheduled_new_reqs:
        request = requests[new.req_id]
        if request.num_output_tokens and not request.num_preemptions:
            new.prefill_token_ids = list(request.all_token_ids)
            resumed.append(new.req_id)
    if resumed:
        setattr(output, _RESUMED, frozenset(resumed))


def resumed_of(output: SchedulerOutput) -> frozenset[str]:
    """The new requests of this step that were begun elsewhere."""
    return getattr(output, _RESUMED, frozenset())


def fill_in(runner: Any, output: SchedulerOutput) -> None:
    """V1: give the runner's own requests their answers so far. Called once it has taken in the schedule.

    They leave the batch and come back to their places, as after a preemption, so all that vLLM derives is made anew.
    """
    names = resumed_of(output)
    if not names:
        return
    batch = runner.input_batch
    states = [runner.requests[name] for name in sorted(names, key=batch.req_id_to_index.__getitem__)]
    tokens = {new.req_id: new.prefill_token_ids for new in output.scheduled_new_reqs}
    for state in states:
        state.output_token_ids.extend(tokens[state.req_id][state.num_prompt_tokens :])
        batch.remove_request(state.req_id)
    _add_again(batch, states)


def _add_again(batch: Any, states: Iterable[Any]) -> None:
    for state in states:
        batch.add_request(state)
    batch.refresh_metadata()


_KEY = "spec_rollout_arrival"  # in `extra_args`: they travel with the request to every worker, whichever runs it
_GREEDY = 1e-5  # below this temperature vLLM samples greedily


class Arrivals:
    """One scheduler's.

    `grammar_end` is the token that ends what a grammar describes, whether or not it ends the request; None: not known.
    """

    def __init__(self, vllm_config: VllmConfig, grammar_end: int | None = None) -> None:
        self._seeds = RequestSeeds.of(vllm_config)
        self._has_connector = vllm_config.kv_transfer_config is not None
        self._problems = Problems()
        self._guard = Guard()
        self._grammar_end = grammar_end

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
        if getattr(request, "resumable", False):
            told["is_session"] = True
        if params.structured_outputs is not None and self._grammar_end is not None:
            told["ends"] = [self._grammar_end]
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


def ends_of_grammar(params: SamplingParams) -> list[int]:
    """Tokens behind which the request's grammar takes no further one in the same step, as some backends fail at it."""
    return list(_told(params).get("ends") or ())


def is_session(params: SamplingParams) -> bool:
    """Whether the request may get more of its prompt once it has ended (vLLM's streaming input)."""
    return bool(_told(params).get("is_session"))


def _told(params: SamplingParams) -> Mapping[str, Any]:
    return (params.extra_args or {}).get(_KEY) or {}
