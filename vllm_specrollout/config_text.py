"""The configuration as text: a flag's or a variable's, JSON or the path of a JSON file."""

from __future__ import annotations

import json
import os
from typing import Any

from vllm_specrollout.errors import ConfigError


def load_text(text: str, origin: str) -> Any:
    """What the text stands for: true, false, or the JSON's value.

    Args:
        origin: where it came from, for messages.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("1", "true", "on", "yes", ""):
        return True
    if lowered in ("0", "false", "off", "no"):
        return False
    if stripped.startswith(("{", "[", '"')):
        content, where = stripped, f"`{origin}`"
    elif os.path.isfile(stripped):
        where = f"`{stripped}`"
        try:
            with open(stripped, encoding="utf-8") as handle:
                content = handle.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", "check the file's permissions and encoding") from None
    else:
        raise ConfigError(
            f"`{origin}` is {stripped!r}: neither JSON nor an existing file",
            "give true, false, a JSON object in single quotes, or the path of a JSON file",
        )
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            'quote keys and text with ", and put the whole object in single quotes on the command line',
        ) from None
