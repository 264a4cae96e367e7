"""One request over HTTP as a client makes it: streamed to its end, or left on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..policy.tokenizer import prompt_text
from .arrivals import GRAMMARS, Arrival
from .server import NAME

PATIENCE_S = 300.0
"""Without a word from the server for so long, a request is lost."""
_HASTE_S = 0.05


class Lost(Exception):
    """A request that got no answer, or no whole one."""


@dataclass(slots=True)
class Answer:
    """What came back."""

    arrival: Arrival
    # the server's name for it
    request_id: str = ""
    prompt: list[int] = field(default_factory=list)
    # per answer
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def sampling(arrival: Arrival, max_tokens: int) -> dict[str, Any]:
    """What the request asks for, in the words that HTTP and `SamplingParams` share."""
    values: dict[str, Any] = {"temperature": 1.0, "seed": arrival.seed, "max_tokens": max_tokens}
    if arrival.grammar >= 0:
        values["structured_outputs"] = GRAMMARS[arrival.grammar]
    return values


def body(arrival: Arrival, max_tokens: int, *, is_ours: bool) -> dict[str, Any]:
    """The body of `POST /v1/completions`."""
    values = {
        "model": NAME,
        "prompt": prompt_text(arrival.problem.prompt),
        "n": arrival.num_answers,
        "stream": True,
        "return_token_ids": True,
        **sampling(arrival, max_tokens),
    }
    if is_ours and arrival.is_named:
        values["vllm_xargs"] = {"spec_rollout": json.dumps({"problem_id": arrival.problem.problem_id})}
    return values


async def ask(
    session: aiohttp.ClientSession, address: str, arrival: Arrival, max_tokens: int, *, is_ours: bool
) -> Answer | None:
    """The whole answer; None once the client has left, as planned.

    Raises:
        Lost: the server answered with an error, fell silent, or ended before every answer had.
    """
    many = arrival.num_answers
    answer = Answer(arrival, tokens=[[] for _ in range(many)], texts=[""] * many, ends=[None] * many)
    request = session.post(f"{address}/v1/completions", json=body(arrival, max_tokens, is_ours=is_ours))
    if arrival.leaves_after == 0:
        # before a word came back: it waits, or its prompt is being computed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HASTE_S), request as response:
                await response.read()
        return None
    chunks = 0
    try:
        async with request as response:
            if response.status != 200:
                raise Lost(f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                _add(answer, json.loads(line[6:]))
                chunks += 1
                if arrival.leaves_after is not None and chunks >= arrival.leaves_after:
                    response.close()
                    return None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(f"{type(error).__name__}: {error}") from None
    if any(end not in ("stop", "length") for end in answer.ends):
        raise Lost(f"the stream ended, and its answers with {answer.ends}")
    return answer


def _add(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise Lost(str(chunk["error"])[:200])
    answer.request_id = chunk["id"]
    for choice in chunk["choices"]:
        place = choice["index"]
        answer.prompt = choice.get("prompt_token_ids") or answer.prompt
        answer.tokens[place] += choice.get("token_ids") or []
        answer.texts[place] += choice.get("text") or ""
        answer.ends[place] = choice.get("finish_reason") or answer.ends[place]
