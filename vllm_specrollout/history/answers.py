"""What the history keeps: one carrier per answer. No files, no indices, no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_specrollout.types import FinishReason, IntArray

MOST_TAIL = 64
"""Tokens of a prompt that are kept with its answer: the longest context there is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer, as far as it got."""

    problem_id: str
    request_id: str
    # counts from 0; a problem's answers of one epoch are each other's siblings
    epoch: int
    # of the policy when the answer ended
    weights_version: int
    status: FinishReason
    # [num_tokens] the answer
    token_ids: IntArray
    # [at most MOST_TAIL] the prompt's last tokens: contexts of the answer's first tokens reach into them
    prompt_tail: IntArray
    # as last reported; None: not reported (yet)
    reward: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size
