"""What a worker knows of a request, and that nothing of it stays once it is over."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_specrollout.config import RequestOptions
from vllm_specrollout.history.problems import Problems
from vllm_specrollout.scheduling.support import DraftMode
from vllm_specrollout.types import FinishReason
from vllm_specrollout.worker.request import Admission, RequestBook, RequestState, ends_of, external_name

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


def test_the_ends_of_an_answer_are_those_that_vllms_scheduler_looks_for() -> None:
    def ends(eos: int | None = 4, also: list[int] | None = None, **options: Any) -> list[int]:
        params = SamplingParams(**options)
        # as vLLM's front end does with a model's config
        params.update_from_generation_config({"eos_token_id": also} if also else {}, eos)
        return ends_of(params).tolist()

    assert ends() == [4] and ends(None) == []
    assert ends(also=[4, 2]) == [2, 4]
    assert ends(stop_token_ids=[9, 7, 9]) == [4, 7, 9]
    assert ends(ignore_eos=True) == [] and ends(ignore_eos=True, also=[2, 3], stop_token_ids=[9]) == [9]
    # until then none is sampled; and where a grammar leaves nothing else, vLLM ends the answer all the same
    assert ends(min_tokens=5) == [4]


def test_what_ends_a_grammar_is_an_end_though_the_answer_goes_on_behind_it() -> None:
    told = {"spec_rollout_arrival": {"problem_id": "", "continues": False, "ends": [4]}}
    params = SamplingParams(ignore_eos=True, stop_token_ids=[9], extra_args=told)
    assert ends_of(params).tolist() == [4, 9]


def test_the_next_part_of_a_session_has_its_own_limits_and_the_noise_goes_on() -> None:
    tapes: list[Any] = []

    def make_tape(generator: torch.Generator) -> Any:
        tapes.append(SimpleNamespace(skip=lambda count: None))
        return tapes[-1]

    admitted: list[Any] = []
    book = RequestBook(DraftMode.TREE, make_tape, admitted.append)

    def part(prompt: list[int], **options: Any) -> None:
        state.prompt_token_ids, state.sampling_params = prompt, SamplingParams(**options)
        state.output_token_ids.clear()

    state: Any = SimpleNamespace(req_id="s", prompt_embeds=None, generator=torch.Generator(), output_token_ids=[])
    part([1, 2, 3], max_tokens=1, seed=1)
    first = book.get(state)
    state.output_token_ids += [8]
    assert first.part_ended(0).status is FinishReason.TRUNCATED
    part([1, 2, 3, 8, 5], max_tokens=80, stop_token_ids=[7])
    book.next_part(state)
    second = book.get(state)
    assert second is not first and second.tape is first.tape is tapes[0] and len(tapes) == 1
    view = second.seen(np.arange(5, dtype=np.int32), 512, 0)
    assert (view.num_prompt_tokens, view.max_new_tokens, view.ends.tolist()) == (5, 80, [7])
    assert [one.num_prompt_tokens for one in admitted] == [3, 5]
    state.output_token_ids += [8, 9]
    assert second.part_ended(0).status is FinishReason.FINISHED and second.part_ended(0).token_ids.tolist() == [8, 9]
    part([1], max_tokens=2, temperature=0.0)
    book.next_part(state)
    assert book.get(state).is_greedy
    part([1], max_tokens=2)
    book.next_part(state)
    assert book.get(state).tape is tapes[0]
