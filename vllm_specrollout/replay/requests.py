"""The requests of a replay, on their way from admission to their ends.

May enter: the records and the carriers. May not: the order of a step, which is simulate.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_specrollout.replay.records import OPEN, Arrival, End, Header, Trace, TraceError
from vllm_specrollout.types import FinishedRequest, FinishReason, IntArray, RequestView

MOST_TOKENS = 1 << 26
"""Tokens of prompts that a replay holds, 4 bytes each."""
MOST_PROMPT_STEPS = 1 << 20
"""Steps that computing all prompts may take."""


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way."""

    arrival: Arrival
    end: End
    name: str
    # [prompt + answer] zeros stand for the prompt: no budget reads what it says
    token_ids: IntArray
    # prompt rows still to be computed
    prompt_left: int
    # tokens generated
    position: int = 0
    # draft nodes to be verified in the next step
    num_nodes: int = 0

    @property
    def is_over(self) -> bool:
        return self.position >= len(self.end.token_ids)

    def view(self, header: Header) -> RequestView:
        arrival = self.arrival
        length = arrival.num_prompt_tokens + self.position
        return RequestView(
            self.name,
            self.token_ids[:length],
            arrival.num_prompt_tokens,
            max(0, min(arrival.max_tokens - self.position, header.max_model_len - length)),
            arrival.shape,
            arrival.max_draft_tokens,
            arrival.problem_id,
            arrival.weights_version,
            self.name,
        )

    def ending(self) -> FinishedRequest:
        prompt = self.arrival.num_prompt_tokens
        # an answer that the recording lost sight of is taken to end where it was last seen
        status = FinishReason.FINISHED if self.end.status == OPEN else FinishReason(self.end.status)
        return FinishedRequest(
            self.name,
            self.arrival.problem_id,
            self.token_ids[:prompt],
            self.token_ids[prompt:],
            status,
            self.end.weights_version,
            self.name,
        )


def requests_of(trace: Trace, prompt_share: float) -> list[Request]:
    """The trace's requests in order of admission; those without an end are left out.

    Raises:
        TraceError: there are more prompt tokens than memory is spent on, or a replay would have too many steps.
    """
    prompts = [arrival.num_prompt_tokens for arrival in trace.arrivals if arrival.request in trace.ends]
    num_tokens, num_rows = sum(prompts), sum(_rows(prompt, prompt_share) for prompt in prompts)
    if num_tokens > MOST_TOKENS or num_rows > MOST_PROMPT_STEPS * trace.header.max_num_batched_tokens:
        cause = (
            f"the trace has {num_tokens} tokens of prompts and {num_rows} rows of prompts,"
            f" {trace.header.max_num_batched_tokens} in a step at most"
        )
        raise TraceError(cause, f"record a shorter run: at most {MOST_TOKENS}, and {MOST_PROMPT_STEPS} steps of them")
    requests = []
    for arrival in trace.arrivals:
        end = trace.ends.get(arrival.request)
        if end is None or not len(end.token_ids):
            continue
        prompt: IntArray = np.zeros(arrival.num_prompt_tokens, dtype=np.int32)
        token_ids = np.concatenate([prompt, end.token_ids])
        rows = _rows(arrival.num_prompt_tokens, prompt_share)
        requests.append(Request(arrival, end, f"r{arrival.request}", token_ids, rows))
    return requests


def _rows(num_prompt_tokens: int, prompt_share: float) -> int:
    """Rows of the forward pass that compute a prompt."""
    return max(1, round(prompt_share * num_prompt_tokens))


def take_rows(request: Request, room: int, rows: dict[str, int]) -> int:
    """Give a request's prompt as many rows as there are; returns the room that is left."""
    taken = min(request.prompt_left, room)
    if taken > 0:
        rows[request.name] = taken
        request.prompt_left -= taken
    return room - max(taken, 0)
