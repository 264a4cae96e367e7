"""Interrupted answers: the request that goes on with one, and those that nobody could go on with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_specrollout import resumed
from vllm_specrollout.config import parse_request
from vllm_specrollout.config.resuming import Resume, asks_for_watermark, check_resume
from vllm_specrollout.errors import ConfigError

HERE = Path(__file__).parent
PROMPT = [5, 6, 7]
LENGTHS = {"prompt_tokens": 3, "answer_tokens": 2}


@dataclass
class Params:
    """Of vLLM's `SamplingParams`, what resuming looks at."""

    max_tokens: int | None = 10
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = 3
    n: int = 1
    stop: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    trace_decode_token_ids: Any = None
    extra_args: dict[str, Any] | None = None

    def clone(self) -> Params:
        return replace(self)


def test_what_goes_on_has_the_limits_that_are_left_and_says_where_its_prompt_ends() -> None:
    before = Params(min_tokens=4, extra_args={"spec_rollout": {"problem_id": "p"}, "other": 1})
    prompt, params = resumed(before, PROMPT, [8, 9])
    assert prompt == [5, 6, 7, 8, 9]
    assert (params.max_tokens, params.min_tokens) == (8, 2)
    assert params.extra_args == {"spec_rollout": {"problem_id": "p", "resume": LENGTHS}, "other": 1}
    assert parse_request(params.extra_args["spec_rollout"]).resume == Resume(**LENGTHS)
    assert before == Params(min_tokens=4, extra_args={"spec_rollout": {"problem_id": "p"}, "other": 1})


@pytest.mark.parametrize("given", [None, "{}", '{"enabled": false}', False, {"enabled": False}])
def test_options_in_every_form_are_kept(given: Any) -> None:
    _, params = resumed(Params(extra_args={"spec_rollout": given}), PROMPT, [8])
    options = parse_request(params.extra_args["spec_rollout"])
    assert (options.enabled, options.resume) == (parse_request(given).enabled, Resume(prompt_tokens=3, answer_tokens=1))


def test_without_a_token_it_is_the_very_same_request() -> None:
    assert resumed(Params(), PROMPT, []) == (PROMPT, Params())


def test_a_complete_answer_is_not_gone_on_with() -> None:
    with pytest.raises(ConfigError, match="the answer has 10 tokens, and `max_tokens` is 10"):
        resumed(Params(), PROMPT, range(10))


@pytest.mark.parametrize(
    "resume",
    [
        Resume(prompt_tokens=3, answer_tokens=0),
        Resume(prompt_tokens=1, answer_tokens=2, drawn=2),
        Resume(prompt_tokens=2, answer_tokens=1),
    ],
)
@pytest.mark.parametrize("params", [Params(), Params(seed=None, temperature=0.0)])
def test_seeded_and_greedy_requests_go_on(resume: Resume, params: Params) -> None:
    check_resume(resume, params, PROMPT, is_v2=False)
    # of a prompt that nobody cut the length of the answer is what is left
    check_resume(replace(resume, answer_tokens=None), params, PROMPT, is_v2=False, is_whole=True)


@pytest.mark.parametrize("length", [1, 2, 4, 5])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_prompt_of_another_length_than_it_was_said_to_have_is_refused(length: int, is_whole: bool) -> None:
    resume = Resume(prompt_tokens=1, answer_tokens=2)
    with pytest.raises(ConfigError, match=f"1 tokens of prompt and 2 of answer, and {length} came"):
        check_resume(resume, Params(), range(length), is_v2=False, is_whole=is_whole)


def test_every_refusal_reads_as_recorded(recorded: Any, render_refusals: Any) -> None:
    resume = Resume(prompt_tokens=2, answer_tokens=1)

    def refuse(params: Params = Params(), resume: Resume = resume, prompt: Any = PROMPT, **more: Any) -> Any:  # noqa: B008
        return lambda: check_resume(resume, params, prompt, **{"is_v2": False, **more})

    cases = {
        "a prompt that was cut": refuse(resume=Resume(prompt_tokens=2, answer_tokens=9)),
        "a prompt that may have been cut": refuse(resume=Resume(prompt_tokens=2)),
        "a prompt that is too short": refuse(resume=Resume(prompt_tokens=4), is_whole=True),
        "more noise than tokens": refuse(resume=replace(resume, drawn=2)),
        "noise by position": refuse(resume=replace(resume, drawn=0), is_v2=True),
        "no seed": refuse(Params(seed=None)),
        "embeddings": refuse(prompt=None),
        "all that cannot be": refuse(
            Params(stop=("a",), n=2, structured_outputs=1, prompt_logprobs=1, thinking_token_budget=4), is_session=True
        ),
        "what replaces sampling": refuse(Params(watermarking=True, trace_decode_token_ids=[1])),
        "no prompt": lambda: parse_request({"resume": {"prompt_tokens": 0}}),
        "no number": lambda: parse_request({"resume": {"prompt_tokens": "3"}}),
        "an answer below zero": lambda: parse_request({"resume": {"prompt_tokens": 3, "answer_tokens": -1}}),
        "drawn below zero": lambda: parse_request({"resume": {"prompt_tokens": 3, "drawn": -1}}),
        "no object": lambda: parse_request({"resume": 3}),
        "an unknown key": lambda: parse_request({"resume": {"prompt_len": 3}}),
    }
    said = render_refusals(cases)
    assert said == recorded(HERE.parent / "refusals" / "resume.txt", said)


def test_the_length_of_the_prompt_is_needed() -> None:
    with pytest.raises(ConfigError, match="prompt_tokens"):
        parse_request({"resume": {}})


def test_a_watermark_that_every_request_has_is_not_asked_for():
    @dataclass
    class Older:
        watermarking: bool = True

    assert not asks_for_watermark(Older()) and not asks_for_watermark(Older(watermarking=False))
    assert asks_for_watermark(Params(watermarking=True)) and not asks_for_watermark(Params())
    assert not asks_for_watermark(object()), "a version without watermarks"
