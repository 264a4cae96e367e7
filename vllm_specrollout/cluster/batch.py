"""Batch of a group: its requests as they are asked, what has come of each, and what each came to. Pure.

A request has one engine at most. What came of it stays known when that engine loses it, and the next one goes on from
there.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_specrollout.cluster.reports import Part
from vllm_specrollout.errors import ConfigError, SpecRolloutError, shown

MOST_LOSSES = 5
"""Times that a request is lost with its engine until it is given up."""
_MOST_TOKEN = 1 << 31
_GREEDY = 1e-5
_MOST_ANSWERS = 16384  # of one prompt, as in vLLM
# what of `SamplingParams` keeps state that tokens do not bring back: such a request is begun anew elsewhere
_KEEPS_STATE = ("stop", "structured_outputs", "thinking_token_budget", "watermarking", "trace_decode_token_ids")


class GroupError(SpecRolloutError):
    """A batch cannot be completed."""


class BeginError(GroupError):
    """An engine cannot be begun, and would not be another time."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """What a request came to."""

    # its name, for `report_rewards`
    request: str
    # [n] token ids
    token_ids: tuple[int, ...]
    # [n] of these tokens, natural logarithm; empty where `logprobs` was unset
    logprobs: tuple[float, ...]
    # vLLM's: `stop` or `length`
    finish_reason: str
    # the stop token or string; empty: the end of the text, or of the length
    stop_reason: str
    # the one that ended it
    engine: str
    # [k] (index of the first token, version of the weights that gave it and those behind it)
    versions: tuple[tuple[int, int], ...]
    # empty where nothing detokenizes
    text: str = ""
    # [n] token id -> (natural logarithm, rank) of what vLLM tells; empty where `logprobs` was not above 0
    choices: tuple[Mapping[int, tuple[float, int]], ...] = ()


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
    # `LoRARequest`, or its arguments; None: no adapter
    lora: Any = None
    # told its name, and what it came to
    sink: Callable[[str, GroupAnswer | GroupError], None] = lambda request, found: None
    # that runs it, and its name there, another one for each run; empty: it waits
    engine: str = ""
    key: str = ""
    # of the answer so far; arrays, as millions of objects in lists would slow down all that Python collects
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[float] = field(default_factory=list)
    choices: list[Mapping[int, tuple[float, int]]] = field(default_factory=list)
    # [k] as in `GroupAnswer`
    versions: list[tuple[int, int]] = field(default_factory=list)
    runs: int = 0
    losses: int = 0
    # tokens that the answer is expected to have, and those at which that is asked for anew
    expected: float = 0.0
    asked_at: int = 0

    def begin(self, engine: str, version: int) -> array[int]:
        """It runs at an engine; [n] the tokens that it goes on behind."""
        if not self.is_resumable:
            self.tokens, self.logprobs, self.choices, self.versions = array("i"), [], [], []
        self.runs += 1
        self.engine, self.key = engine, f"{self.request}.{self.runs}"
        if not self.versions or self.versions[-1][1] != version:
            count = len(self.tokens)
            self.versions = [one for one in self.versions if one[0] < count] + [(count, version)]
        return self.tokens[:]

    def extend(self, part: Part) -> None:
        """What came of it where it runs."""
        self.tokens.extend(part.tokens)
        if part.logprobs:
            self.logprobs += part.logprobs
            self.choices += part.choices

    def lose(self) -> GroupError | None:
        """Its engine ended. Too often, and the request may be why: then it gets no answer."""
        self.losses += 1
        if self.losses < MOST_LOSSES:
            return None
        return GroupError(
            f"request {self.request} was lost {self.losses} times, each time with the engine that ran it",
            "look at the engines' own messages: the request may be what ends them",
        )

    def end(self, part: Part) -> GroupAnswer:
        """It is complete, with this part."""
        tokens, logprobs, choices = tuple(self.tokens), tuple(self.logprobs), tuple(self.choices)
        end = part.finish, part.reason, self.engine
        return GroupAnswer(self.key, tokens, logprobs, *end, tuple(self.versions), part.text, choices)


class RequestChecker:
    """Requests as users give them, checked before any is dealt.

    Args:
        seed: of the seeds that requests without one get.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._batches = random.Random(seed), 0

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: Any,
        lora: Any = None,
        sink: Callable[[str, GroupAnswer | GroupError], None] = lambda request, found: None,
    ) -> dict[str, Open]:
        """
        Args:
            lora, sink: of all, as in `Open`.

        Raises:
            ConfigError: token ids or parameters that cannot be used.
        """
        many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ConfigError(f"there are {len(prompts)} prompts and {len(many)} `params`", "give one for each")
        self._batches += 1
        found: dict[str, Open] = {}
        for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
            tokens = _tokens(i, prompt)
            for own in self._each(one):
                request = f"{self._batches}-{len(found)}"
                keeps_state = any(_value(own, name) for name in _KEEPS_STATE)
                most = _value(own, "max_tokens") or _MOST_TOKEN
                problem = _problem(one, tokens)
                found[request] = Open(request, tokens, own, problem, not keeps_state, most, lora, sink)
        return found

    def _each(self, given: Any) -> list[Any]:
        """[n] of the answers to one prompt, as vLLM asks for them; with seeds, so that each goes on elsewhere."""
        if type(given) is not dict and not isinstance(given, Mapping) and not hasattr(given, "clone"):
            raise ConfigError(
                f"`params` holds a {type(given).__name__}",
                'give `SamplingParams` or its arguments, as {"max_tokens": 64}',
            )
        if _value(given, "prompt_logprobs") is not None:
            raise ConfigError("`prompt_logprobs` is given, and a group tells none", "use one engine for those")
        count, seed = _value(given, "n", 1), _value(given, "seed")
        if not isinstance(count, int) or not 1 <= count <= _MOST_ANSWERS:
            raise ConfigError(f"`n` is {shown(count)}", f"give a whole number from 1 to {_MOST_ANSWERS}")
        is_greedy = _value(given, "temperature", 1.0) < _GREEDY
        if seed is None and is_greedy:
            return [_with(given, n=1)] * count
        seeds = [self._rng.randrange(1 << 62) if seed is None else seed + i for i in range(count)]
        return [_with(given, n=1, seed=one) for one in seeds]


def _with(params: Any, **values: Any) -> Any:
    """The same parameters, but for these."""
    if type(params) is dict or isinstance(params, Mapping):
        return {**params, **values}
    clone = params.clone()
    for name, value in values.items():
        setattr(clone, name, value)
    return clone


def _value(params: Any, name: str, default: Any = None) -> Any:
    if type(params) is dict or isinstance(params, Mapping):
        return params.get(name, default)
    return getattr(params, name, default)


def _problem(params: Any, tokens: Sequence[int]) -> str:
    """What a request is a sample of: its `problem_id`, else its prompt."""
    own = (_value(params, "extra_args") or {}).get("spec_rollout")
    named = own.get("problem_id") if isinstance(own, Mapping) else None
    return f"id {named}" if named is not None else f"prompt {hash(tuple(tokens))}"


def _tokens(number: int, prompt: Sequence[int]) -> array[int]:
    """[P] token ids of a prompt, each in the range that engines know."""
    try:
        found = np.asarray(prompt)  # a batch has millions of them
    except ValueError:  # lists of several lengths
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"prompt {number} is {shown(prompt)}, and neither a text nor whole numbers alone",
            "give a text or a list of token ids for each prompt, as [[1, 2], [3]]",
        )
    if not found.size:
        raise ConfigError(f"prompt {number} is empty", "give each prompt one token at least")
    wrong = found[(found < 0) | (found >= _MOST_TOKEN)]
    if wrong.size:
        raise ConfigError(
            f"prompt {number} holds {shown(int(wrong[0]))}, outside 0 to {_MOST_TOKEN - 1}",
            "give the tokenizer's ids, without padding",
        )
    return array("i", found.astype(np.intc).tobytes())
