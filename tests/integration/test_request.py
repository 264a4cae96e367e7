"""What a worker knows of a request, and that nothing of it stays once it is over."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_specrollout.config import RequestOptions
from vllm_specrollout.history.problems import Problems
from vllm_specrollout.scheduling.support import DraftMode
from vllm_specrollout.types import FinishReason
from vllm_specrollout.worker.request import Admission, RequestState, external_name

TOKENS = np.arange(4, dtype=np.int32)


@pytest.mark.parametrize(
    ("engines", "clients"),
    [
        ("a-0123abcd", "a"),
        ("3_chat-cmpl-89abcdef-0123abcd", "3_chat-cmpl-89abcdef"),
        # none of what vLLM appends
        ("a-0123abc", "a-0123abc"),
        ("a-0123ABCD", "a-0123ABCD"),
        ("a-0123abcd\n", "a-0123abcd\n"),
        ("-0123abcd", ""),
        ("", ""),
    ],
)
def test_a_request_is_known_under_its_clients_name(monkeypatch: pytest.MonkeyPatch, engines: str, clients: str) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
    assert external_name(engines) == clients
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert external_name(engines) == engines


def test_of_requests_that_are_over_no_id_stays_whatever_its_length() -> None:
    length, count, problems = 1 << 16, 200, Problems()

    def answer(number: int) -> None:
        name = f"{number}-{'x' * length}-0123abcd"
        problem = problems.arrive(name, [5, 6, 7, 8], [9, 10]).problem_id
        state = RequestState(name, Admission(RequestOptions(), problem, DraftMode.TREE, 8), TOKENS, len(TOKENS))
        state.seen(TOKENS, 64, 0)
        assert state.ending(TOKENS, TOKENS, FinishReason.FINISHED, 0).name == external_name(name)
        problems.end(name)

    answer(0)
    tracemalloc.start()
    try:
        for number in range(count):
            answer(number)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # less than two ids of 200
    assert kept < 2 * length
