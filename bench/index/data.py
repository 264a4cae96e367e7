"""Data of the index benchmark: recorded answers of the small policy, and synthetic long ones.

Both are problems with answers of past epochs and of the present one. Pure but for the reading of one file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_specrollout.errors import ConfigError
from vllm_specrollout.types import IntArray

Key = tuple[int, int]
"""(problem, answer of the present epoch)"""
RECORDED = Path(__file__).with_name("recorded.json.gz")
"""Answers of the policy in packages/policy, sampled at temperature 1 by stock vLLM: 16 per problem and epoch.

Epoch e's weights are epoch e - 1's plus normal noise of 1 % of each tensor's standard deviation.
"""
VOCABULARY = 150_000
_SEGMENT = 40
_MUTATION = 0.01


@dataclass(frozen=True, slots=True)
class Epoch:
    """The answers to one problem in one epoch."""

    answers: tuple[IntArray, ...]
    # [answers] float
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RecordedProblem:
    prompt: IntArray
    # oldest first; the last one is the present
    epochs: tuple[Epoch, ...]

    @property
    def past(self) -> tuple[Epoch, ...]:
        return self.epochs[:-1]

    @property
    def present(self) -> Epoch:
        return self.epochs[-1]


@dataclass(frozen=True, slots=True)
class Data:
    name: str
    problems: tuple[RecordedProblem, ...]
    # share of the tokens that were made anew for their answer alone; None: not known
    new_share: float | None = None

    @property
    def num_past_tokens(self) -> int:
        return sum(len(a) for problem in self.problems for epoch in problem.past for a in epoch.answers)

    @property
    def answers(self) -> dict[Key, IntArray]:
        """Those of the present."""
        return {(p, a): ids for p, problem in enumerate(self.problems) for a, ids in enumerate(problem.present.answers)}


def recorded(path: Path = RECORDED, past: int = 2) -> Data:
    """Recorded problems: the last epoch is the present, `past` epochs before it are history.

    Raises:
        ConfigError: the file is not there, or is something else.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            problems = tuple(
                RecordedProblem(
                    np.asarray(line["prompt"], np.int32),
                    tuple(
                        Epoch(tuple(np.asarray(ids, np.int32) for ids in epoch["answers"]), tuple(epoch["rewards"]))
                        for epoch in line["epochs"][-1 - past :]
                    ),
                )
                for line in json.load(file)["problems"]
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"`{path}` holds no recorded answers: {error}", "restore it from the checkout") from None
    return Data("recorded", problems)


def synthetic(problems: int, answers: int, tokens: int, past: int, seed: int) -> Data:
    """Problems whose answers share 60 to 90 % of their text.

    A problem is a row of segments of 40 tokens on average, with one to four wordings each, some likelier than others.
    An answer goes through the segments; each is one of the wordings, or new text in 10 to 40 % of the cases, and one
    token in a hundred is changed. New tokens are drawn by Zipf's law from 150,000.
    """
    rng = np.random.default_rng(seed)
    made, num_new = [], 0
    for _ in range(problems):
        segments = list(_segments(rng, tokens))
        epochs = []
        for _ in range(past + 1):
            drawn = [_answer(rng, segments, tokens) for _ in range(answers)]
            num_new += sum(new for _, new in drawn)
            epochs.append(Epoch(tuple(answer for answer, _ in drawn), (0.0,) * answers))
        made.append(RecordedProblem(_text(rng, 200), tuple(epochs)))
    return Data("synthetic", tuple(made), num_new / (problems * (past + 1) * answers * tokens))


def _text(rng: np.random.Generator, count: int) -> IntArray:
    # the inverse of the logarithmic distribution function, which Zipf's law with exponent 1 has
    return np.floor(np.exp(rng.random(count) * np.log(VOCABULARY))).astype(np.int32)


def _segments(rng: np.random.Generator, tokens: int) -> Iterator[tuple[list[IntArray], NDArray[np.float64]]]:
    total = 0
    while total < 2 * tokens:
        length = int(rng.geometric(1 / _SEGMENT))
        wordings = int(rng.integers(1, 5))
        yield [_text(rng, length) for _ in range(wordings)], rng.dirichlet(np.ones(wordings))
        total += length


def _answer(
    rng: np.random.Generator, segments: list[tuple[list[IntArray], NDArray[np.float64]]], tokens: int
) -> tuple[IntArray, int]:
    """The answer, and how many of its tokens are new."""
    shared = rng.uniform(0.6, 0.9)
    parts: list[IntArray] = []
    is_new: list[NDArray[np.bool_]] = []
    total = 0
    for wordings, odds in segments:
        is_fresh = rng.random() > shared
        part = _text(rng, len(wordings[0])) if is_fresh else wordings[rng.choice(len(wordings), p=odds)]
        parts.append(part)
        is_new.append(np.full(len(part), is_fresh))
        total += len(part)
        if total >= tokens:
            break
    answer = np.concatenate(parts)[:tokens]
    changed = rng.random(len(answer)) < _MUTATION
    answer[changed] = _text(rng, int(changed.sum()))
    return answer, int((changed | np.concatenate(is_new)[:tokens]).sum())
