"""Requests of a replay, on their way from admission to their ends, and the drafter that proposes what was recorded.

May enter: the records and the carriers. May not: the order of a step, which is simulate.py's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout import _core
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.replay.records import OPEN, Arrival, Candidates, End, Header, Trace, TraceError
from vllm_specrollout.trees.batch import batch_of
from vllm_specrollout.trees.build import below
from vllm_specrollout.types import (
    EMPTY_TREE,
    Answer,
    DraftLimits,
    DraftTree,
    FinishReason,
    IntArray,
    RequestBatch,
    RequestView,
    TreeBatch,
    VerifyResult,
)

MOST_TOKENS = 1 << 26
"""Tokens of prompts that a replay holds, 4 bytes each."""
MOST_PROMPT_STEPS = 1 << 20
"""Steps that computing all prompts may take."""


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request on its way."""

    arrival: Arrival
    end: End
    # [prompt + answer] zeros stand for the prompt: no budget reads what it says
    token_ids: IntArray
    view: RequestView
    # prompt rows still to be computed
    prompt_left: int
    # tokens generated
    position: int = 0
    # draft nodes to be verified in the next step
    num_nodes: int = 0

    @property
    def truth(self) -> IntArray:
        """What is still to be generated."""
        return self.token_ids[self.arrival.num_prompt_tokens + self.position :]

    @property
    def is_over(self) -> bool:
        return self.position >= len(self.end.token_ids)

    def advance(self, num_tokens: int, header: Header) -> None:
        arrival, view = self.arrival, self.view
        self.position += num_tokens
        length = arrival.num_prompt_tokens + self.position
        view.token_ids = self.token_ids[:length]
        view.max_new_tokens = max(0, min(arrival.max_tokens - self.position, header.max_model_len - length))

    def take_rows(self, room: int) -> int:
        """Of the prompt, as many rows as there is room for are computed; returns how many."""
        taken = max(min(self.prompt_left, room), 0)
        self.prompt_left -= taken
        return taken

    def ending(self) -> Answer:
        prompt = self.arrival.num_prompt_tokens
        # an answer that the recording lost sight of is taken to end where it was last seen
        status = FinishReason.FINISHED if self.end.status == OPEN else FinishReason(self.end.status)
        return Answer(
            self.view.request_id,
            self.arrival.problem_id,
            self.token_ids[:prompt],
            self.token_ids[prompt:],
            status,
            self.end.weights_version,
            self.view.name,
        )


def requests_of(trace: Trace, prompt_share: float) -> list[ReplayedRequest]:
    """The trace's requests in order of admission; those without an end are left out.

    Raises:
        TraceError: there are more prompt tokens than memory is spent on, or a replay would have too many steps.
    """
    told = [(arrival, trace.ends[arrival.request]) for arrival in trace.arrivals if arrival.request in trace.ends]
    rows = [max(1, round(prompt_share * arrival.num_prompt_tokens)) for arrival, _ in told]
    num_tokens, most = sum(arrival.num_prompt_tokens for arrival, _ in told), trace.header.max_num_batched_tokens
    if num_tokens > MOST_TOKENS or sum(rows) > MOST_PROMPT_STEPS * most:
        cause = (
            f"the trace has {num_tokens} tokens of prompts and {sum(rows)} rows of prompts, {most} in a step at most"
        )
        raise TraceError(cause, f"record a shorter run: at most {MOST_TOKENS}, and {MOST_PROMPT_STEPS} steps of them")
    requests = []
    for (arrival, end), left in zip(told, rows, strict=True):
        if end.token_ids:
            prompt = arrival.num_prompt_tokens
            token_ids = np.concatenate([np.zeros(prompt, np.int32), np.asarray(end.token_ids, np.int32)])
            facts = (arrival.shape, arrival.max_draft_tokens, arrival.problem_id, arrival.weights_version)
            name = f"r{arrival.request}"
            ends = np.asarray(arrival.ends, np.int32)
            view = RequestView(name, token_ids[:prompt], prompt, arrival.max_tokens, *facts, name, ends=ends)
            requests.append(ReplayedRequest(arrival, end, token_ids, view, left))
    if not requests:
        raise TraceError("no request of the trace has an end", "record until at least one answer is over")
    return requests


class RecordedDrafter(BaseDrafter):
    """Proposes what the recorded drafters did, all of them as one, also where the recording has no root.

    A replayed budget verifies less or more than the recorded one, so it stands at positions at which nothing was
    recorded. There the last tree recorded before it is followed along the truth, and what hangs below is the proposal:
    smaller than a fresh one, never better.

    Args:
        requests: name -> request, of all that may be asked for.
        spend: told how many requests it was asked for, each time.
    """

    name = "recorded"

    def __init__(self, trace: Trace, requests: Mapping[str, ReplayedRequest], spend: Callable[[int], None]) -> None:
        self._requests, self._spend = requests, spend
        recorded: dict[int, dict[int, Candidates]] = {}
        for step in trace.steps:
            for candidates in step.candidates:
                # a request drafted for twice at one position was preempted in between: the later tree counts
                recorded.setdefault(candidates.request, {})[candidates.position] = candidates
        self._recorded = recorded
        self._positions = {request: sorted(found) for request, found in recorded.items()}

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        wanted = limits.wanted(0).tolist()
        # what asking takes was recorded for all that were looked at; an expensive drafter is asked for some of them
        self._spend(batch.size if limits.drafters is None else sum(nodes > 0 for nodes in wanted))
        asked = zip(map(self._requests.__getitem__, batch.request_ids), wanted, strict=True)
        return batch_of(batch.request_ids, [self._at(request) if nodes else EMPTY_TREE for request, nodes in asked])

    def _at(self, request: ReplayedRequest) -> DraftTree:
        number = request.arrival.request
        positions = self._positions.get(number, [])
        nearest = bisect.bisect_right(positions, request.position) - 1
        if nearest < 0:
            return EMPTY_TREE
        root = positions[nearest]
        return below(self._recorded[number][root].tree, request.end.token_ids[root : request.position])


def verified(trees: TreeBatch, truths: Sequence[IntArray]) -> VerifyResult:
    """What the target makes of trees when the answers are known: how far each agrees with the truth.

    Args:
        truths: [R] each request's tokens from here on.
    """
    lengths = np.minimum(trees.sizes, [len(truth) for truth in truths]).astype(np.int32)
    ahead = np.zeros((len(lengths), lengths.max(initial=0)), dtype=np.int32)
    for row, truth, length in zip(ahead, truths, lengths.tolist(), strict=True):
        row[:length] = truth[:length]
    return VerifyResult(*_core.follow(trees.node_start, trees.parents, trees.token_ids, ahead, lengths))
