"""What is settled of a request in the order of arrival, and what the workers read of it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import Request

from vllm_specrollout.config import envs
from vllm_specrollout.history.problems import Attribution, prompt_hash
from vllm_specrollout.types import DraftMode
from vllm_specrollout.worker.arriving import Arrivals, RequestSeeds, attribution_of, is_unseeded, signed
from vllm_specrollout.worker.request import Admissions

PROMPT = [5, 6, 7, 8]


def arrivals(seed: int = 7, connector: Any = None) -> Arrivals:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(seed=seed),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        kv_transfer_config=connector,
    )
    return Arrivals(config)


def request(name: str, params: SamplingParams, prompt: list[int] | None = None, **options: Any) -> Request:
    return Request(name, list(prompt or PROMPT), params, None, **options)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=20, **options)


def test_only_who_samples_without_a_seed_is_given_one_and_the_clients_parameters_stay_as_they_are() -> None:
    shared, seeded, greedy = params(temperature=0.7), params(seed=3), params(temperature=0.0)

    def greeted(suffix: str) -> list[Request]:
        door = arrivals()
        requests = [request(f"{i}{suffix}", one) for i, one in enumerate((shared, seeded, greedy, shared))]
        for one in requests:
            door.add(one)
        return requests

    requests = greeted("")
    seeds = [one.sampling_params.seed for one in requests]
    assert seeds[1:3] == [3, None] and seeds[0] != seeds[3] and None not in (seeds[0], seeds[3])
    assert [is_unseeded(one.sampling_params) for one in requests] == [True, False, False, True]
    assert shared.seed is None and shared.extra_args is None and requests[0].sampling_params.temperature == 0.7
    # another rank, which greets the same requests in the same order, under other names
    assert [one.sampling_params.seed for one in greeted("-x")] == seeds


def test_ranks_draw_the_same_seeds_engines_of_a_data_parallel_group_others_and_nobody_elses_state_is_touched() -> None:
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    one, other = RequestSeeds(7), RequestSeeds(7)
    drawn = [one.draw() for _ in range(100)]
    assert drawn == [other.draw() for _ in range(100)] and len(set(drawn)) == 100
    assert all(0 <= seed < 2**62 for seed in drawn)
    assert drawn[0] not in (RequestSeeds(8).draw(), RequestSeeds(7, 1).draw(), RequestSeeds(-7).draw())
    assert random.getstate() == random_state and (np.random.get_state()[1] == numpy_state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("seed", [0, -1, 5, 2**63 - 1, 2**63, 2**63 + 4, 2**64 - 1])
def test_a_seed_that_is_no_signed_number_is_the_same_64_bits_and_the_same_noise(seed: int) -> None:
    fits = signed(seed)
    assert -(2**63) <= fits < 2**63 and (fits - seed) % 2**64 == 0
    assert fits == seed or seed >= 2**63
    given, made = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(fits)
    assert torch.equal(torch.rand(4, generator=given), torch.rand(4, generator=made))


def test_a_session_is_known_and_drafted_for_where_its_parts_are_admitted_anew() -> None:
    door, admissions = arrivals(), Admissions(DraftMode.TREE)
    repeats = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
    session, plain = request("a", params(seed=1), resumable=True), request("b", params(seed=1))
    looping = request("c", params(seed=1, repetition_detection=repeats), resumable=True)
    for one in (session, plain, looping):
        door.add(one)

    def shape(one: Request, **runner: bool) -> DraftMode:
        return admissions.admit(one.sampling_params, PROMPT, has_prompt_embeds=False, **runner).shape

    assert [shape(one) for one in (session, plain, looping)] == [DraftMode.TREE, DraftMode.TREE, DraftMode.OFF]
    assert [shape(one, drafts_sessions=False) for one in (session, plain)] == [DraftMode.OFF, DraftMode.TREE]
    assert list(admissions.reasons()) == ["a part of a streaming-input session may end amid a draft"]


def test_the_workers_read_the_problem_that_the_scheduler_found() -> None:
    door, admissions = arrivals(), Admissions(DraftMode.TREE)
    first = request("a", params(seed=1, extra_args={"mine": 1}))
    assert door.add(first) == Attribution(prompt_hash(PROMPT))
    first.append_output_token_ids([11, 12, 13])
    door.end("a")
    again = request("b", params(seed=1), [*PROMPT, 11, 12])
    assert door.add(again) == attribution_of(again.sampling_params) == Attribution(prompt_hash(PROMPT), True)
    assert first.sampling_params.extra_args["mine"] == 1
    admission = admissions.admit(again.sampling_params, again.prompt_token_ids, has_prompt_embeds=False)
    assert (admission.problem_id, admission.continues) == (prompt_hash(PROMPT), True)
    # what came past our scheduler is judged by its prompt
    admission = admissions.admit(params(), [*PROMPT, 11, 12], has_prompt_embeds=False)
    assert (admission.problem_id, admission.continues) == (prompt_hash([*PROMPT, 11, 12]), False)


def resumed() -> SamplingParams:
    return params(seed=1, extra_args={"spec_rollout": {"resume": {"prompt_tokens": 4}}})


def test_a_resumed_request_is_its_own_prompts_and_a_session_counts() -> None:
    door = arrivals()
    assert door.add(request("a", resumed(), [*PROMPT, 1, 2])) == Attribution(prompt_hash(PROMPT), True)
    found = door.add(request("b", params(), [9, 9], session_id="s")).problem_id
    assert door.add(request("c", params(), [3, 3], session_id="s")) == Attribution(found, True)
    # its priority says nothing of the problem
    assert door.add(request("d", params(), priority=3)) == Attribution(prompt_hash(PROMPT))


def test_beside_a_connector_a_resumed_request_alone_reads_no_cached_keys_and_values() -> None:
    for connector in (None, object()):
        door, found = arrivals(connector=connector), []
        for given in (params(seed=1), resumed()):
            one = request("a", given, [*PROMPT, 1, 2])
            door.add(one)
            found.append(one.skip_reading_prefix_cache)
        assert found == [False, connector is not None]


def test_a_salt_and_an_adapter_make_problems_of_their_own() -> None:
    door, adapter = arrivals(), LoRARequest("adapter", 1, "/none")
    each = [{}, {"cache_salt": "tenant"}, {"lora_request": adapter}]

    def problems(*options: dict[str, Any], **given: Any) -> list[str]:
        names = (f"{i} {given}" for i in range(len(options)))
        return [
            door.add(request(name, params(**given), **one)).problem_id for name, one in zip(names, options, strict=True)
        ]

    found = problems(*each, {**each[1], **each[2]})
    assert found[0] == prompt_hash(PROMPT) and len(set(found)) == 4
    assert problems(*each, extra_args={"spec_rollout": {"problem_id": "mine"}}) == ["mine"] * 3


def test_a_failure_in_finding_a_problem_costs_drafts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.STRICT, "0")
    door, sound = arrivals(), arrivals()
    monkeypatch.setattr(door._problems, "arrive", broken)
    monkeypatch.setattr(door._problems, "end", broken)
    named = params(temperature=0.7, extra_args={"spec_rollout": {"problem_id": "mine"}})
    for given, problem in ((params(temperature=0.7), ""), (named, "mine")):
        one, other = request(f"a {problem}", given), request(f"a {problem}", given)
        sound.add(other)
        assert door.add(one) == attribution_of(one.sampling_params) == Attribution(problem)
        assert one.sampling_params.seed == other.sampling_params.seed, "a seed decides tokens"
        door.end(one.request_id)
    assert list(door._guard.failures.values()) == [4]


def broken(*args: Any, **options: Any) -> Attribution:
    raise KeyError("unknown")


def test_what_streaming_input_brings_is_of_its_sessions_problem() -> None:
    door = arrivals()
    session = request("a", params(), resumable=True)
    problem = door.add(session).problem_id
    session.append_output_token_ids([11, 12, 13])
    for prompt in ([21, 22], [31, 32]):
        # that it is to be resumed says nothing of a part of a session
        options = {"spec_rollout": {"resume": {"prompt_tokens": 1}}}
        part = request("a", params(extra_args=options), prompt, resumable=True)
        assert door.add(part, session) == attribution_of(part.sampling_params) == Attribution(problem, continues=True)
        assert is_unseeded(part.sampling_params) and part.prompt_token_ids == prompt and not part.num_output_tokens
    # nobody else's request goes on from a part, and the session is known to run
    assert door.add(request("b", params(), [21, 22])) == Attribution(prompt_hash([21, 22]))
    assert door.add(request("c", params(), [*PROMPT, 11, 12])) == Attribution(problem, continues=True)
    door.end("a")
    assert door.add(request("d", params(), [*PROMPT, 11, 12, 13, 1])) == Attribution(problem, continues=True)
    # no part counts as a request that ended without a token
    assert door.add(request("e", params(), [31, 32])) == Attribution(prompt_hash([31, 32]))
