"""Prompts: a file of them, and texts or chat messages made into a model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_specrollout.errors import ConfigError, UnsupportedError

Prompt = str | list[dict[str, Any]]
"""A text, or chat messages, which the model's chat template makes a prompt of."""


class Line(msgspec.Struct, frozen=True):
    """A line of a file of prompts."""

    prompt: Prompt


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in its order.

    Raises:
        ConfigError: it cannot be read, a line is none, or there is no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`--prompts` is `{path}`, which cannot be read: {error}", "name a text file") from None
    if path.suffix != ".jsonl":
        found: list[Any] = [line for line in lines if line.strip()]
    else:
        found = [_line(path, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"`--prompts` is `{path}`, which holds no prompt", "write a prompt a line")
    return found


def _line(path: Path, number: int, line: str) -> Prompt:
    try:
        return msgspec.json.decode(line, type=Line).prompt
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"line {number} of `{path}` is no prompt: {error}",
            'write {"prompt": "TEXT"}, or {"prompt": [{"role": "user", "content": "TEXT"}]}',
        ) from None


class Tokenizer:
    """A model's own.

    Raises:
        ConfigError: the model has none.
        UnsupportedError: transformers is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"texts need a tokenizer, and `{error.name}` is not installed",
                "run `pip install transformers`, or give token ids",
            ) from None
        self._model = model
        try:
            self._own = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"`{model}` has no tokenizer: {str(error).partition(chr(10))[0]:.200}",
                "name a model's folder, or its name on the hub",
            ) from None

    def prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, messages by the chat template.

        Raises:
            ConfigError: there is no template for messages, or the prompt has no token.
        """
        if isinstance(prompt, str):
            found = list(self._own.encode(prompt))
        elif not self._own.chat_template:
            raise ConfigError(
                f"`{self._model}` has no chat template, and a prompt is messages",
                "give the prompts as texts",
            )
        else:
            text = self._own.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            found = list(self._own.encode(text, add_special_tokens=False))
        if not found:
            raise ConfigError("a prompt has no token", "give each prompt a word at least")
        return found

    def encode(self, text: Prompt, is_prompt: bool) -> Sequence[int]:
        """Token ids of a prompt or of an answer."""
        if is_prompt:
            return self.prompt(text)
        found: list[int] = self._own.encode(text, add_special_tokens=False)
        return found
