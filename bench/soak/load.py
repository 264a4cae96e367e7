"""Load of a soak: arrivals and requests, planned from a seed alone; and one request as a client makes it.

Nothing of how fast the server is enters the plan: the same seed asks a server with drafts and one without for the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from vllm_specrollout.bench.policy.reward import problems
from vllm_specrollout.bench.policy.tasks import FAMILIES, Problem, make_problem
from vllm_specrollout.bench.policy.tokenizer import prompt_text

from ..runner.server import NAME

PLAIN, CHOICES, GRAMMAR = "plain", "choices", "grammar"
MOST_CHOICES = 4
"""Most answers of one request."""
MOST_CHUNKS = 40
"""A client that leaves does so after fewer chunks; after none: while it waits, or while its prompt is computed."""
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": r"The answer is [0-9]{1,3}\."},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}},
)
"""Few, and asked for again and again: vLLM keeps each grammar that it compiled."""
PATIENCE_S = 300.0
"""Without a word from the server for so long, a request is lost."""
_HASTE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request."""

    number: int
    # seconds since the first could come
    at_s: float
    kind: str
    problem: Problem
    is_recurring: bool
    # of the first answer's noise; vLLM counts up from it for further ones
    seed: int
    num_answers: int
    # of GRAMMARS; -1: none
    grammar: int
    # None: the client stays
    leaves_after: int | None
    is_checked: bool

    def sampling(self, max_tokens: int) -> dict[str, Any]:
        """What it asks for, in the words that HTTP and `SamplingParams` share."""
        values: dict[str, Any] = {"temperature": 1.0, "seed": self.seed, "max_tokens": max_tokens}
        return values | ({"structured_outputs": GRAMMARS[self.grammar]} if self.grammar >= 0 else {})

    def body(self, max_tokens: int) -> dict[str, Any]:
        """The body of `POST /v1/completions`; every other client names the problem, the server finds out the rest."""
        shared = {"model": NAME, "n": self.num_answers, "stream": True, "return_token_ids": True}
        values = {**shared, "prompt": prompt_text(self.problem.prompt), **self.sampling(max_tokens)}
        if self.number % 2 == 0:
            values["vllm_xargs"] = {"spec_rollout": json.dumps({"problem_id": self.problem.problem_id})}
        return values


def arrivals(plan: Any, checked: float) -> Iterator[ClientRequest]:
    """Endless arrivals of a Poisson process; each prefix is that of any longer run.

    Args:
        plan: the scenario, which says how often what is asked for.
        checked: share that is compared with stock's answers, of those that stay.
    """
    rng = random.Random(f"soak/{plan.seed}")
    pool = problems(plan.pool, plan.seed)
    at_s, number = 0.0, 0
    while True:
        at_s += rng.expovariate(plan.rate)
        # as many draws for each, so that one share moves no other request
        recurs, kind, leaves, looked_at = rng.random(), rng.random(), rng.random(), rng.random()
        place, answers, chunks = rng.randrange(plan.pool), rng.randint(2, MOST_CHOICES), rng.randrange(MOST_CHUNKS)
        is_recurring, is_grammar = recurs < plan.recurring, kind < plan.grammar
        is_plural = not is_grammar and kind < plan.grammar + plan.choices
        stays = leaves >= plan.leaving
        # asked once, but for chance: the smallest ones may meet
        family, name = FAMILIES[number % len(FAMILIES)], f"once-{plan.seed}-{number}"
        once = make_problem(random.Random(f"soak/{plan.seed}/{number}"), family, name)
        yield ClientRequest(
            number=number,
            at_s=at_s,
            kind=GRAMMAR if is_grammar else CHOICES if is_plural else PLAIN,
            problem=pool[place] if is_recurring else once,
            is_recurring=is_recurring,
            seed=(plan.seed + number * MOST_CHOICES) % (1 << 31),
            num_answers=answers if is_plural else 1,
            grammar=place % len(GRAMMARS) if is_grammar else -1,
            leaves_after=None if stays else chunks,
            is_checked=stays and looked_at < checked,
        )
        number += 1


class Lost(Exception):
    """A request that got no answer, or no whole one."""


@dataclass(slots=True)
class Reply:
    """What came back."""

    arrival: ClientRequest
    # the server's name for it
    request_id: str = ""
    prompt: list[int] = field(default_factory=list)
    # per answer
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)

    def add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Lost(str(chunk["error"])[:200])
        self.request_id = chunk["id"]
        for choice in chunk["choices"]:
            place = choice["index"]
            self.prompt = choice.get("prompt_token_ids") or self.prompt
            self.tokens[place] += choice.get("token_ids") or []
            self.texts[place] += choice.get("text") or ""
            self.ends[place] = choice.get("finish_reason") or self.ends[place]


async def ask(session: aiohttp.ClientSession, arrival: ClientRequest, max_tokens: int) -> Reply | None:
    """The whole answer; None once the client has left, as planned.

    Raises:
        Lost: the server answered with an error, fell silent, or ended before every answer had.
    """
    many = arrival.num_answers
    answer = Reply(arrival, tokens=[[] for _ in range(many)], texts=[""] * many, ends=[None] * many)
    request = session.post("/v1/completions", json=arrival.body(max_tokens))
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
                answer.add(json.loads(line[6:]))
                chunks += 1
                if arrival.leaves_after is not None and chunks >= arrival.leaves_after:
                    response.close()
                    return None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Lost(f"{type(error).__name__}: {error}") from None
    if any(end not in ("stop", "length") for end in answer.ends):
        raise Lost(f"the stream ended, and its answers with {answer.ends}")
    return answer
