"""Batch of a group: its requests as they are asked, what has come of each, and what each came to. Pure.

A request has one engine at most. What came of it stays known when that engine loses it, and the next one goes on from
there.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_specrollout.cluster.reports import Part
from vllm_specrollout.errors import ConfigError, SpecRolloutError, shown

MOST_LOSSES = 5
"""Times that a request is lost with its engine until it is given up."""
_MOST_TOKEN = 1 << 31
_GREEDY = 1e-5
# what of `SamplingParams` keeps state that tokens do not bring back: such a request is begun anew elsewhere
_KEEPS_STATE = ("stop", "structured_outputs", "thinking_token_budget", "watermarking", "trace_decode_token_ids")
_ALLOWED = {"n": (1,), "logprobs": (None, 0), "prompt_logprobs": (None,)}


class GroupError(SpecRolloutError):
    """A batch cannot be completed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to."""

    # its name, for `report_rewards`
    request: str
    # [n] token ids
    token_ids: tuple[int, ...]
    # [n] of these tokens, natural logarithm; empty where `logprobs` was not 0
    logprobs: tuple[float, ...]
    # vLLM's: `stop` or `length`
    finish_reason: str
    # the stop token or string; empty: the end of the text, or of the length
    stop_reason: str
    # the one that ended it
    engine: str
    # [k] (index of the first token, version of the weights that gave it and those behind it)
    versions: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Open:
    """A request of which not all is told yet."""

    request: str
    prompt: Sequence[int]
    # `SamplingParams`, or its arguments; with a seed if it samples
    params: Any
    # what it is a sample of
    problem: str
    # whether its tokens bring back all that it is; else it begins anew with each engine
    is_resumable: bool
    # tokens that its answer may have
    most: int = _MOST_TOKEN
    # that runs it, and its name there, another one for each run; empty: it waits
    engine: str = ""
    key: str = ""
    # of the answer so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # [k] as in `Answer`
    versions: list[tuple[int, int]] = field(default_factory=list)
    runs: int = 0
    losses: int = 0
    answer: Answer | None = None
    # why there will be no answer
    failure: GroupError | None = None

    def begin(self, engine: str, version: int) -> list[int]:
        """It runs at an engine; [n] the tokens that it goes on behind."""
        if not self.is_resumable:
            self.tokens, self.logprobs, self.versions = [], [], []
        self.runs += 1
        self.engine, self.key = engine, f"{self.request}.{self.runs}"
        if not self.versions or self.versions[-1][1] != version:
            count = len(self.tokens)
            self.versions = [one for one in self.versions if one[0] < count] + [(count, version)]
        return list(self.tokens)

    def extend(self, part: Part) -> None:
        """What came of it where it runs."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs

    def leave(self) -> str:
        """Nobody runs it any more; its name where it ran."""
        self.engine = ""
        return self.key

    def lose(self) -> None:
        """Its engine ended. Too often, and the request may be why."""
        self.losses += 1
        if self.losses >= MOST_LOSSES:
            self.failure = GroupError(
                f"request {self.request} was lost {self.losses} times, each time with the engine that ran it",
                "look at the engines' own messages: the request may be what ends them",
            )

    def end(self, finish: str, reason: str) -> None:
        """It is complete."""
        tokens, logprobs, versions = tuple(self.tokens), tuple(self.logprobs), tuple(self.versions)
        self.answer = Answer(self.key, tokens, logprobs, finish, reason, self.engine, versions)


class RequestChecker:
    """Requests as users give them, checked before any is dealt.

    Args:
        seed: of the seeds that requests without one get.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._batches = random.Random(seed), 0

    def ask(self, prompts: Sequence[Sequence[int]], params: Any) -> dict[str, Open]:
        """
        Raises:
            ConfigError: token ids or parameters that cannot be used.
        """
        many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ConfigError(f"there are {len(prompts)} prompts and {len(many)} `params`", "give one for each")
        self._batches += 1
        found = {}
        for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
            tokens, request = _tokens(i, prompt), f"{self._batches}-{i}"
            seeded = self._seeded(one)
            keeps_state = any(_value(one, name) for name in _KEEPS_STATE)
            found[request] = Open(
                request,
                tokens,
                seeded,
                _problem(one, tokens),
                not keeps_state,
                _value(one, "max_tokens") or _MOST_TOKEN,
            )
        return found

    def _seeded(self, given: Any) -> Any:
        """With a seed if it samples: every copy of the request has the same noise."""
        if not isinstance(given, Mapping) and not hasattr(given, "clone"):
            raise ConfigError(
                f"`params` holds a {type(given).__name__}",
                'give `SamplingParams` or its arguments, as {"max_tokens": 64}',
            )
        for name, allowed in _ALLOWED.items():
            value = _value(given, name, allowed[0])
            if value not in allowed:
                raise ConfigError(
                    f"`{name}` is {value!r}, and a group takes {' or '.join(map(str, allowed))}",
                    "ask for each answer by itself, with a seed of its own; or use one engine",
                )
        if _value(given, "seed") is not None or _value(given, "temperature", 1.0) < _GREEDY:
            return dict(given) if isinstance(given, Mapping) else given
        seed = self._rng.randrange(1 << 62)
        if isinstance(given, Mapping):
            return {**given, "seed": seed}
        clone = given.clone()
        clone.seed = seed
        return clone


def _value(params: Any, name: str, default: Any = None) -> Any:
    return params.get(name, default) if isinstance(params, Mapping) else getattr(params, name, default)


def _problem(params: Any, tokens: Sequence[int]) -> str:
    """What a request is a sample of: its `problem_id`, else its prompt."""
    own = (_value(params, "extra_args") or {}).get("spec_rollout")
    named = own.get("problem_id") if isinstance(own, Mapping) else None
    return f"id {named}" if named is not None else f"prompt {hash(tuple(tokens))}"


def _tokens(number: int, prompt: Sequence[int]) -> list[int]:
    """[P] token ids of a prompt, each in the range that engines know."""
    try:
        found = [int(operator.index(token)) for token in prompt]
    except TypeError:
        raise ConfigError(
            f"prompt {number} is {shown(prompt)}, and neither a text nor whole numbers alone",
            "give a text or a list of token ids for each prompt, as [[1, 2], [3]]",
        ) from None
    if not found:
        raise ConfigError(f"prompt {number} is empty", "give each prompt one token at least")
    wrong = next((token for token in found if not 0 <= token < _MOST_TOKEN), None)
    if wrong is not None:
        raise ConfigError(
            f"prompt {number} holds {shown(wrong)}, outside 0 to {_MOST_TOKEN - 1}",
            "give the tokenizer's ids, without padding",
        )
    return found
