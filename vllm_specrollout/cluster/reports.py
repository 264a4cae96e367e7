"""Reports of a group's engines, and what engines are told: plain values that cross between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each engine has to be at before it may answer."""

    # of all that follows
    version: int = 0
    epoch: int | None = None
    # (version, method of vLLM's workers that brings the weights, its arguments); None: the weights of the start. The
    # method is empty where they came by a transfer, which nobody can repeat
    update: tuple[int, str, Mapping[str, Any]] | None = None
    # vLLM's sleep level; 0: awake
    asleep: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """One run of a request."""

    # its name at the engine, another one for each run
    key: str
    # [P] token ids
    prompt: Sequence[int]
    # `SamplingParams`, or its arguments
    params: Any
    # [n] token ids of the answer so far
    answer: Sequence[int] = ()
    # `LoRARequest`, or its arguments; None: no adapter
    lora: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """What came of one run since the last report."""

    # [n] token ids
    tokens: Sequence[int]
    # [n] of these tokens, natural logarithm; empty where `logprobs` was unset
    logprobs: Sequence[float]
    steps: int
    # vLLM's reason for its end, `error` where it was refused; empty: it goes on
    finish: str = ""
    # the stop token or string, or what was wrong
    reason: str = ""
    # of the whole answer, at its end; empty where nothing detokenizes
    text: str = ""
    # [n] token id -> (natural logarithm, rank), where `logprobs` was above 0
    choices: Sequence[Mapping[int, tuple[float, int]]] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What came at one engine since the last report."""

    # run -> what came; of runs without news nothing
    parts: Mapping[str, Part] = field(default_factory=dict)
    # (requests, steps, seconds) where the same requests ran all the while
    pace: tuple[int, int, float] | None = None
    # tokens of prompts that were computed, and how much longer steps took for them
    filled: tuple[int, float] = (0, 0.0)
