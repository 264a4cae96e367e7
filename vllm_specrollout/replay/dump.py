"""Dumps: answers of rollouts as their user kept them, JSON lines of token ids or texts.

What belongs here: which fields a line may have, and which lines were one rollout. Texts become tokens by a function
that is given. Lines may be as verl's `trainer.rollout_data_dir` and `specrollout bench grpo --trace` have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    " and beside them `problem_id`, `epoch` and `step`, or none of these"
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


@dataclass(frozen=True, slots=True)
class DumpedAnswer:
    """An answer, and to what."""

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
    lines, told = list[_Line](), list[DumpedAnswer]()
    problems: dict[bytes, str] = {}
    for number, text in _numbered(path):
        line = _decoded(path, number, text, lines)
        prompt, answer = _tokens(path, number, line, encode)
        if not len(answer):
            continue
        lines.append(line)
        # without an id, the prompt tells the problem
        own = problems.setdefault(prompt.tobytes(), f"prompt {len(problems) + 1}")
        told.append(DumpedAnswer(own if line.problem_id is None else str(line.problem_id), prompt, answer))
    if not told:
        raise DumpError(f"`{path}` holds no answer", f"give a line for each answer: {_FIELDS}")
    return list(_rollouts(lines, told))


def _numbered(path: Path) -> Iterable[tuple[int, bytearray]]:
    lines = PackedLines(path, f"name a file of JSON lines: {_FIELDS}")
    last = 0
    for last, line in enumerate(lines, start=1):
        if line.strip():
            yield last, line
    # a file of an editor has no end of its last line
    if lines.rest.strip():
        yield last + 1, lines.rest


def _decoded(path: Path, number: int, text: bytearray, before: Sequence[_Line]) -> _Line:
    if number == 1 and MAGIC.encode() in text[:64]:
        cause = f"`{path}` is a recorded trace: it holds no prompts"
        raise DumpError(cause, f"run `specrollout replay {path}`, or give a file with prompts and answers")
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DumpError(f"line {number} of `{path}` is no answer: {error!s:.200}", f"write {_FIELDS}") from None
    for name in ("epoch", "step"):
        if before and (getattr(line, name) is None) != (getattr(before[0], name) is None):
            has, first = ("no", "one") if getattr(line, name) is None else ("a", "none")
            cause = f"line {number} of `{path}` has {has} `{name}`, and the first answer has {first}"
            raise DumpError(cause, f"give `{name}` in every line, or in none")
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
        if ids is None and encode is None:
            cause = f"line {number} of `{path}` has its {name} as {shown(text)}, and no model is named"
            raise ConfigError(cause, f"name the model, whose tokenizer is needed: `try MODEL --from {path}`")
        if ids is None:
            assert encode is not None
            ids = list(encode(text, name == "prompt"))
        found.append(np.asarray(ids, np.int32))
    if not len(found[0]):
        raise DumpError(f"line {number} of `{path}` has an empty prompt", "give each prompt a token at least")
    return found[0], found[1]


def _rollouts(lines: Sequence[_Line], told: Sequence[DumpedAnswer]) -> Iterable[DumpedRollout]:
    """Lines of one epoch and step are one rollout; who tells no epoch is in that which its problems say."""
    groups: dict[tuple[int, int], list[DumpedAnswer]] = {}
    for line, one in zip(lines, told, strict=True):
        groups.setdefault((line.epoch or 0, line.step or 0), []).append(one)
    seen: Counter[str] = Counter()
    for (epoch, _), answers in sorted(groups.items()):
        problems = sorted({one.problem_id for one in answers})
        before = Counter(seen[problem] for problem in problems)
        seen.update(problems)
        # of equally many, the later one
        guess = 1 + max(before, key=lambda times: (before[times], times))
        yield DumpedRollout(guess if lines[0].epoch is None else epoch, tuple(answers))
