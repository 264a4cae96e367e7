"""Dumps: answers of rollouts as their user kept them, JSON lines of token ids or texts.

What belongs here: which fields a line may have, and which lines were one rollout. Texts become tokens by a function
that is given. Lines may be as verl's `trainer.rollout_data_dir` and `specrollout bench grpo --trace` have them. A
rollout may still be writing: a last line without its end is no answer yet, unless it is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_specrollout.budgets.step_cost import Count
from vllm_specrollout.errors import ConfigError, SpecRolloutError, shown
from vllm_specrollout.replay.files import PackedLines
from vllm_specrollout.replay.records import MAGIC, Token
from vllm_specrollout.types import IntArray

Encode = Callable[[Any, bool], Sequence[int]]
"""(a text or chat messages, whether it is a prompt) -> its tokens."""
MOST_ANSWERS = 1 << 20
_FIELDS = (
    '{"prompt_token_ids": [...], "token_ids": [...]} or {"prompt": TEXT, "answer": TEXT},'
    " and beside them `problem_id`, `epoch`, `step` and the weights' `version`, or none of these"
)


class DumpError(SpecRolloutError):
    """A dump cannot be read."""


class _Line(msgspec.Struct, frozen=True):
    """A line; of each pair of names one is given. Other fields are not read."""

    # texts or chat messages; verl says `input`
    prompt: str | list[dict[str, Any]] | None = None
    input: str | None = None
    prompt_token_ids: list[Token] | None = None
    # verl says `output`
    answer: str | None = None
    output: str | None = None
    token_ids: list[Token] | None = None
    problem_id: str | int | None = None
    epoch: Count | None = None
    # of training: its lines were generated together
    step: Count | None = None
    # of the weights that answered; 0: not told
    version: Count = 0


@dataclass(frozen=True, slots=True)
class DumpedAnswer:
    """An answer, and to what."""

    # without one, the prompt tells the problem
    problem_id: str
    # [P], [A] int32: tokens of the prompt and of the answer
    prompt: IntArray
    answer: IntArray


@dataclass(frozen=True, slots=True)
class DumpedRollout:
    """Answers that were generated together."""

    # as told; else how many times its problems had been answered before, and one
    epoch: int
    answers: tuple[DumpedAnswer, ...]


def read_dump(path: Path, encode: Encode | None = None) -> list[DumpedRollout]:
    """The rollouts of a dump, in the order of their epochs and steps.

    Args:
        encode: None: the dump has to hold token ids.

    Raises:
        DumpError: it cannot be read, a line is none, or it holds no answer.
        ConfigError: a line has texts, and there is no `encode`.
    """
    told = [(line, one) for _, line, one in read_answers(path, encode)]
    if not told:
        raise DumpError(f"`{path}` holds no answer", f"give a line for each answer: {_FIELDS}")
    return list(_rollouts(told))


def read_answers(
    path: Path, encode: Encode | None = None, after: int = 0, vocab_size: int = 1 << 31
) -> list[tuple[int, _Line, DumpedAnswer]]:
    """The answers of a dump that have a token, each behind its line and that one's number; there may be none.

    Args:
        after: number of a line; those up to it were read before.
        vocab_size: every token lies below it.

    Raises:
        DumpError, ConfigError: as `read_dump`.
    """
    told, problems = list[tuple[int, _Line, DumpedAnswer]](), dict[bytes, str]()
    for number, text in dropwhile(lambda one: one[0] <= after, _numbered(path)):
        line = _decoded(path, number, text, told)
        prompt, answer = _tokens(path, number, line, encode)
        if (most := max(prompt.max(), answer.max(initial=0))) >= vocab_size:
            raise DumpError(
                f"line {number} of `{path}` has the token {most}, and the model has {vocab_size}",
                "give the answers of this model",
            )
        if len(answer):
            own = problems.setdefault(prompt.tobytes(), f"prompt {len(problems) + 1}")
            told.append(
                (number, line, DumpedAnswer(own if line.problem_id is None else str(line.problem_id), prompt, answer))
            )
    return told


def _numbered(path: Path) -> Iterable[tuple[int, bytearray]]:
    lines = PackedLines(path, f"name a file of JSON lines: {_FIELDS}")
    last = 0
    for last, line in enumerate(lines, start=1):
        if line.strip():
            yield last, line
    # a file of an editor has no end of its last line; what is still being written is no JSON yet
    with suppress(msgspec.DecodeError, RecursionError):
        msgspec.json.decode(lines.rest)
        yield last + 1, lines.rest


def _decoded(path: Path, number: int, text: bytearray, before: Sequence[tuple[int, _Line, DumpedAnswer]]) -> _Line:
    if number == 1 and MAGIC.encode() in text[:64]:
        raise DumpError(
            f"`{path}` is a recorded trace: it holds no prompts",
            f"run `specrollout replay {path}`, or give a file with prompts and answers",
        )
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"line {number} of `{path}` is no answer: {error!s:.200}", f"write {_FIELDS}") from None
    for name in ("epoch", "step"):
        if before and (getattr(line, name) is None) != (getattr(before[0][1], name) is None):
            has, first = ("no", "one") if getattr(line, name) is None else ("a", "none")
            raise DumpError(
                f"line {number} of `{path}` has {has} `{name}`, and the first answer has {first}",
                f"give `{name}` in every line, or in none",
            )
    if len(before) >= MOST_ANSWERS:
        raise DumpError(f"`{path}` holds more than {MOST_ANSWERS} answers", "give its last epochs alone")
    return line


def _tokens(path: Path, number: int, line: _Line, encode: Encode | None) -> tuple[IntArray, IntArray]:
    """Of prompt and answer."""
    pairs = (
        ("prompt", line.prompt_token_ids, line.prompt if line.prompt is not None else line.input),
        ("answer", line.token_ids, line.answer if line.answer is not None else line.output),
    )
    missing = next((name for name, ids, text in pairs if ids is None and text is None), None)
    if missing is not None:
        raise DumpError(f"line {number} of `{path}` has no {missing}", f"write {_FIELDS}")
    found = []
    for name, ids, text in pairs:
        if ids is None:
            if encode is None:
                raise ConfigError(
                    f"line {number} of `{path}` has its {name} as {shown(text)}, and no model is named",
                    f"name the model, whose tokenizer is needed: `try MODEL --from {path}`",
                )
            ids = list(encode(text, name == "prompt"))
        found.append(np.asarray(ids, np.int32))
    if not len(found[0]):
        raise DumpError(f"line {number} of `{path}` has an empty prompt", "give each prompt a token at least")
    return found[0], found[1]


def _rollouts(told: Sequence[tuple[_Line, DumpedAnswer]]) -> Iterable[DumpedRollout]:
    """Lines of one epoch and step are one rollout; who tells no epoch is in that which its problems say."""
    groups: dict[tuple[int, int], list[DumpedAnswer]] = {}
    for line, one in told:
        groups.setdefault((line.epoch or 0, line.step or 0), []).append(one)
    seen: Counter[str] = Counter()
    for (epoch, _), answers in sorted(groups.items()):
        problems = sorted({one.problem_id for one in answers})
        before = Counter(seen[problem] for problem in problems)
        seen.update(problems)
        # of equally many, the later one
        guess = 1 + max(before, key=lambda times: (before[times], times))
        yield DumpedRollout(guess if told[0][0].epoch is None else epoch, tuple(answers))
