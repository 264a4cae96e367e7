"""Requests whose ids are as long as clients like, as the scheduler and a worker keep them; in a process of its own."""

from __future__ import annotations

import numpy as np

from vllm_specrollout.config import RequestOptions
from vllm_specrollout.history.problems import Problems
from vllm_specrollout.support import DraftMode
from vllm_specrollout.types import FinishReason

from .memory import rss_mib

PROMPT, ANSWER = [5, 6, 7, 8], [9, 10]


def growth_of_ids(count: int, num_bytes: int) -> float:
    """MiB by which memory grows with so many requests, each of them over before the next one comes."""
    # brings vLLM, which is no growth
    from vllm_specrollout.worker.request import Admission, RequestState

    problems, tokens = Problems(), np.array(PROMPT + ANSWER, dtype=np.int32)

    def ask(number: int) -> None:
        # vLLM puts the last part behind what the client gives
        request = f"{number}-{'x' * num_bytes}-{number:08x}"
        found = problems.arrive(request, PROMPT, ANSWER)
        admission = Admission(RequestOptions(), found.problem_id, DraftMode.TREE, 100, found.continues)
        state = RequestState(request, admission, tokens[: len(PROMPT)], len(PROMPT))
        state.seen(tokens, 1000, 0)
        state.ending(tokens[: len(PROMPT)], tokens[len(PROMPT) :], FinishReason.FINISHED, 0)
        problems.end(request)

    ask(0)
    before = rss_mib()
    for number in range(1, count + 1):
        ask(number)
    return rss_mib() - before
