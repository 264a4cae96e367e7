"""A file of prompts and answers, JSON lines, which a rollout may still be writing.

A line has token ids, `{"prompt_token_ids": [...], "token_ids": [...]}`, or text, `{"prompt": "...", "answer": "..."}`,
and may have the `version` of the weights that answered. Text is encoded anew, so ids are the surer way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specrollout.errors import ConfigError, UnsupportedError, shown

from .answers import KeptAnswer

_FORMS = (("prompt_token_ids", "token_ids"), ("prompt", "answer"))
_HINT = 'write {"prompt_token_ids": [...], "token_ids": [...]} or {"prompt": "...", "answer": "..."}'


class AnswerFile:
    """Reads what was added since it was read last.

    Args:
        encode: (text, whether it begins a sequence) -> token ids.
        vocab_size: of the target.

    Raises:
        UnsupportedError: there is no such file.
    """

    def __init__(self, path: Path, encode: Callable[[str, bool], list[int]], vocab_size: int) -> None:
        if not path.is_file():
            raise UnsupportedError(f"`{path}` is no file", f"name a file of prompts and answers; for each, {_HINT}")
        self._path, self._encode, self._vocab_size = path, encode, vocab_size
        self._read = self._lines = 0

    def unread(self) -> list[KeptAnswer]:
        """Answers of whole lines; a version is what the file says, or 0.

        Raises:
            ConfigError: a line that is no answer.
        """
        with self._path.open("rb") as file:
            file.seek(self._read)
            # what follows the last line's end is being written, or lacks its end
            data = file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if rest := data[whole:].strip():
            try:
                json.loads(rest)
            except ValueError:
                pass
            else:
                lines, whole = [*lines, rest], len(data)
        self._read += whole
        found = []
        for line in lines:
            self._lines += 1
            if line.strip():
                found.append(self._answer_of(line))
        return found

    def _answer_of(self, line: bytes) -> KeptAnswer:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise self._wrong(f"is no JSON: {error}") from None
        forms = [form for form in _FORMS if isinstance(entry, dict) and all(name in entry for name in form)]
        if not forms:
            raise self._wrong(f"has no prompt and answer: {shown(entry)}")
        prompt, answer = (self._ids_of(name, entry[name], begins=i == 0) for i, name in enumerate(forms[0]))
        version = entry.get("version", 0)
        if type(version) is not int:
            raise self._wrong(f"has `version` {shown(version)}, which is no integer")
        return KeptAnswer(np.array(prompt + answer, dtype=np.int32), len(prompt), version)

    def _ids_of(self, name: str, value: Any, *, begins: bool) -> list[int]:
        ids = self._encode(value, begins) if name in _FORMS[1] and isinstance(value, str) else value
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < self._vocab_size for one in ids):
            raise self._wrong(f"has a `{name}` that is none for {self._vocab_size} tokens: {shown(value)}")
        return ids

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"line {self._lines} of `{self._path}` {what}", _HINT)
