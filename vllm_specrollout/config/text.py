"""The configuration as text: a flag's or a variable's, JSON or the path of a JSON file."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from vllm_specrollout.errors import ConfigError, named, shown_path

MOST_BYTES = 1 << 20
"""Of a configuration in a file."""


def load_text(text: str, origin: str) -> Any:
    """What the text stands for: true, false, or the JSON's value.

    Args:
        origin: where it came from, for messages.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("1", "true", "on", "yes"):
        return True
    if lowered in ("0", "false", "off", "no"):
        return False
    if not stripped:
        raise ConfigError(f"`{origin}` is empty", "give true, false, a JSON object or a file; or leave it out")
    if stripped.startswith(("{", "[", '"')):
        content, where = stripped, f"`{origin}`"
    elif os.path.isfile(path := os.path.expanduser(stripped)):
        where = f"`{shown_path(path)[1:-1]}`"
        try:
            with open(path, encoding="utf-8") as handle:
                content = handle.read(MOST_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"{where} cannot be read: {said}", "check the file's permissions and encoding") from None
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{where} has more than {MOST_BYTES} characters", "name a file with a JSON object in it")
    else:
        raise ConfigError(
            f"`{origin}` is {shown_path(stripped)}: neither JSON nor an existing file",
            "give true, false, a JSON object in single quotes, or the path of a JSON file",
        )
    way = 'quote keys and text with ", and put the whole object in single quotes on the command line'
    return load_json(content, where, way)


def load_json(content: str, where: str, way: str) -> Any:
    """The value of a JSON text.

    Args:
        where: what the text is, for messages.
        way: what is suggested where it cannot be read.

    Raises:
        ConfigError: it is no JSON, names a key twice, is nested too deeply or holds a number of thousands of digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ConfigError(f"{where} has the key `{named(twice)}` twice", "give each key once")
        return found

    try:
        return json.loads(content, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at {at}", way) from None
    except ConfigError:
        raise
    except ValueError:
        # Python's own limit, which bounds the time that a number may take
        most = sys.get_int_max_str_digits()
        raise ConfigError(f"{where} holds a number of more than {most} digits", "give a smaller number") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply", "give a JSON object as the reference describes it") from None
