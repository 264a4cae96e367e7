"""How an engine takes up an answer that was interrupted: as one that it preempted itself, and that comes back.

What belongs here: the request as the scheduler keeps it, and as the V1 runner does. The V2 runner takes preempted
requests as new ones with a longer prefill, so it needs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_specrollout.config import parse_request

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
