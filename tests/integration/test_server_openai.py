"""The server as its users drive it: through the `openai` package, drafts on, against the same requests drafts off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from vllm_specrollout.bench.policy import CHECKPOINT

from tests.integration.serving import ask, counters, serve

PROMPT = "17 + 45 - 8 + 9 - 3 + 21"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    # `auto` may leave drafting where the host is slow, and there is nothing to compare then
    flags = ("--spec-rollout.budget", "fixed", "--max-model-len", "1024", "--dtype", "float32")
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serve(str(CHECKPOINT), log, *flags) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none")


def _with(options: dict[str, Any]) -> dict[str, Any]:
    return {"vllm_xargs": {"spec_rollout": json.dumps(options)}}


ON, OFF = _with({}), _with({"enabled": False})


def _counted(address: str, kind: str = "draft") -> float:
    return counters(address).get(f"num_{kind}_tokens", 0.0)


def _chat(client: OpenAI, extra: dict[str, Any], **options: Any) -> Any:
    messages = [{"role": "user", "content": PROMPT}]
    return client.chat.completions.create(
        model="tiny", messages=messages, seed=5, temperature=1.0, max_tokens=200, extra_body=extra, **options
    )


def test_completions_are_the_same_with_drafts_and_without(client: OpenAI, address: str) -> None:
    def complete(extra: dict[str, Any]) -> list[Any]:
        return [
            client.completions.create(
                model="tiny", prompt=PROMPT, seed=seed, max_tokens=120, logprobs=2, extra_body=extra
            ).choices[0]
            for seed in range(4)
        ]

    before = _counted(address)
    with_drafts = complete(ON)
    assert _counted(address) > before
    between = _counted(address)
    without = complete(OFF)
    assert _counted(address) == between
    for a, b in zip(with_drafts, without, strict=True):
        assert a.text == b.text and a.finish_reason == b.finish_reason
        assert a.logprobs.tokens == b.logprobs.tokens
        assert a.logprobs.token_logprobs == pytest.approx(b.logprobs.token_logprobs, abs=1e-4)


def test_four_choices_of_a_chat_and_their_logprobs_are_the_same_with_drafts_and_without(client: OpenAI) -> None:
    a, b = (_chat(client, extra, n=4, logprobs=True, top_logprobs=3) for extra in (ON, OFF))
    assert [c.message.content for c in a.choices] == [c.message.content for c in b.choices]
    assert len({c.message.content for c in a.choices}) > 1
    assert a.usage.completion_tokens == b.usage.completion_tokens
    own, plain = ([x for c in one.choices for x in c.logprobs.content] for one in (a, b))
    assert [x.token for x in own] == [x.token for x in plain]
    assert [x.logprob for x in own] == pytest.approx([x.logprob for x in plain], abs=1e-4)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9999}}, "required": ["n"],
}}}]  # fmt: skip
CALL = r'<tool_call>\{"name": "look", "arguments": \{"n": [0-9]{1,5}\}\}</tool_call>'


@pytest.mark.parametrize(
    ("choice", "form"), [("auto", CALL), ("auto", f"[a-z ]{{3,9}}{CALL}\n{CALL}"), ("required", "")]
)
def test_tool_calls_come_as_streams_with_drafts_as_without(
    client: OpenAI, address: str, choice: str, form: str
) -> None:
    """A step brings several tokens, so the parser meets other pieces of text."""
    shaped = {"structured_outputs": {"regex": form}} if form else {}

    def ask(extra: dict[str, Any]) -> tuple[str, dict[int, list[str]], str | None]:
        stream = _chat(client, {**extra, **shaped}, tools=TOOLS, tool_choice=choice, stream=True)
        text, calls, reason = "", {}, None
        for chunk in stream:
            (one,) = chunk.choices
            text, reason = text + (one.delta.content or ""), one.finish_reason or reason
            for call in one.delta.tool_calls or ():
                whole = calls.setdefault(call.index, ["", ""])
                whole[0] += call.function.name or ""
                whole[1] += call.function.arguments or ""
        return text, calls, reason

    ask(ON)
    before = _counted(address, "accepted")
    drafted = ask(ON)  # from the history
    assert _counted(address, "accepted") > before
    assert drafted == ask(OFF)
    assert drafted[1] and all(name == "look" for name, _ in drafted[1].values())


def test_requests_as_trl_posts_them_are_the_same_with_drafts_and_without(address: str) -> None:
    """TRL 1.16.0, `vllm_mode="server"`: `VLLMClient.generate`, with `generation_kwargs` of a seed."""
    prompts = [[3, 87, 261, 308, 18, 4], [3, 90, 120, 7, 4]]
    payload = {
        "model": "tiny", "prompt": prompts, "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 3,
        "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 60,
        "logprobs": 0, "seed": 5,
    }  # fmt: skip

    def post(extra: dict[str, Any]) -> list[dict[str, Any]]:
        return ask(address, "/v1/completions", {**payload, **extra})[1]["choices"]

    before = _counted(address)
    a, b = post({}), post(OFF)
    assert _counted(address) > before
    assert [choice["prompt_token_ids"] for choice in a[::3]] == prompts
    assert [choice["token_ids"] for choice in a] == [choice["token_ids"] for choice in b]
    assert len({tuple(choice["token_ids"]) for choice in a[:3]}) > 1
    for choice in a:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_a_streamed_chat_adds_up_to_the_whole_one(client: OpenAI) -> None:
    whole = _chat(client, ON).choices[0].message.content
    chunks = [c.choices[0].delta.content or "" for c in _chat(client, ON, stream=True) if c.choices]
    assert "".join(chunks) == whole
    assert len(chunks) > 2


def test_concurrent_clients_get_what_they_get_alone(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"{seed} + {PROMPT}", seed=seed, max_tokens=100, extra_body=ON
        )
        return answer.choices[0].text

    alone = [ask(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(ask, range(12))] == alone


def test_a_client_that_leaves_mid_stream_does_not_disturb_the_others(client: OpenAI) -> None:
    wanted = _chat(client, OFF).choices[0].message.content
    for _ in range(3):
        stream = _chat(client, ON, stream=True)
        next(iter(stream))
        stream.close()
    assert _chat(client, ON).choices[0].message.content == wanted


def test_a_request_can_limit_its_drafts(client: OpenAI, address: str) -> None:
    before = _counted(address)
    limited = _chat(client, _with({"max_draft_tokens": 0})).choices[0].message.content
    assert _counted(address) == before
    assert limited == _chat(client, _with({"max_draft_tokens": 2})).choices[0].message.content


def test_a_resumed_answer_goes_on_and_one_whose_prompt_is_cut_is_one_clear_400(client: OpenAI) -> None:
    def complete(prompt: Any, max_tokens: int, extra: dict[str, Any]) -> Any:
        more = {"return_token_ids": True, **extra}
        return client.completions.create(
            model="tiny", prompt=prompt, seed=7, max_tokens=max_tokens, extra_body=more
        ).choices[0]

    whole = complete(PROMPT, 30, ON)
    prompt, answer = whole.prompt_token_ids, whole.token_ids
    given, left = [*prompt, *answer[:10]], 30 - 10
    lengths = {"prompt_tokens": len(prompt), "answer_tokens": 10}
    resume = _with({"resume": lengths})
    assert complete(given, left, resume).token_ids == answer[10:]
    assert complete(given, left, {**resume, "truncate_prompt_tokens": len(given)}).token_ids == answer[10:]
    for side in ({}, {"truncation_side": "left"}, {"truncation_side": "right"}):
        with pytest.raises(BadRequestError, match=f"and 10 of answer, and {len(given) - 3} came"):
            complete(given, left, {**resume, "truncate_prompt_tokens": len(given) - 3, **side})
    # who does not say how long the answer is would not be told
    with pytest.raises(BadRequestError, match="`resume.answer_tokens` is not given"):
        complete(given, left, _with({"resume": {"prompt_tokens": len(prompt)}}))


def test_a_chat_that_is_resumed_must_not_be_cut(client: OpenAI) -> None:
    length = len(_chat(client, {**ON, "return_token_ids": True}).prompt_token_ids)
    resume = _with({"resume": {"prompt_tokens": length - 4, "answer_tokens": 4}})
    assert _chat(client, resume).choices
    with pytest.raises(BadRequestError, match=f"and 4 of answer, and {length - 1} came"):
        _chat(client, {**resume, "truncate_prompt_tokens": length - 1})
