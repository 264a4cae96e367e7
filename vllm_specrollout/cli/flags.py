"""From the text of a flag to checked values; a mistake is a `ConfigError` that names flag, value and limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_specrollout.errors import ConfigError


def integers(text: str, flag: str, low: int, high: int) -> tuple[int, ...]:
    """`1,4,16` -> (1, 4, 16), in ascending order.

    Raises:
        ConfigError: not a list of different whole numbers from low to high.
    """
    example = f"give whole numbers from {low} to {high}, for example `{flag} {_example(low, high)}`"
    values = []
    for part in _parts(text, flag, example):
        try:
            value = int(part)
        except ValueError:
            raise ConfigError(f"`{flag}` holds {part!r}, which is no whole number", example) from None
        if not low <= value <= high:
            raise ConfigError(f"`{flag}` holds {value}, outside {low} to {high}", example)
        if value in values:
            raise ConfigError(f"`{flag}` holds {value} twice", "name each value once")
        values.append(value)
    return tuple(sorted(values))


def probabilities(text: str, flag: str) -> tuple[float, ...]:
    """`0.6,0.2` -> (0.6, 0.2), the probability of each rank.

    Raises:
        ConfigError: not a list of numbers from 0 to 1 with a sum of at most 1.
    """
    example = f"give one probability per rank, for example `{flag} 0.6,0.2`"
    values = []
    for part in _parts(text, flag, example):
        try:
            value = float(part)
        except ValueError:
            raise ConfigError(f"`{flag}` holds {part!r}, which is no number", example) from None
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"`{flag}` holds {part}, outside 0 to 1", example)
        values.append(value)
    if sum(values) > 1.0 + 1e-9:
        raise ConfigError(f"`{flag}` sums to {sum(values):g}, above 1", "the ranks exclude each other: lower them")
    return tuple(values)


def shares(text: str, flag: str) -> tuple[float, ...]:
    """`0.5,0.9` -> (0.5, 0.9), each one on its own, in the order given.

    Raises:
        ConfigError: not a list of different numbers from 0 to 1.
    """
    values = tuple(probabilities(part, flag)[0] for part in _parts(text, flag, f"for example `{flag} 0.5,0.9`"))
    if len(set(values)) != len(values):
        raise ConfigError(f"`{flag}` is {text!r}, which holds a value twice", "name each value once")
    return values


def temperatures(text: str, flag: str) -> tuple[float, ...]:
    """Numbers above 0, at most 10, in the order given."""
    try:
        found = tuple(float(part) for part in _parts(text, flag, "1,1.5"))
    except ValueError:
        found = ()
    if not found or not all(0.0 < one <= 10.0 for one in found):
        raise ConfigError(f"`{flag}` is {text!r}, not a list of numbers above 0, at most 10", "write it as in `1,1.5`")
    return found


def names(text: str, flag: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    """`a,b` -> ("a", "b"), each one of `choices`.

    Raises:
        ConfigError: an unknown name.
    """
    values = tuple(_parts(text, flag, f"choose from: {', '.join(choices)}"))
    for value in values:
        choice(value, flag, choices)
    return values


def choice(value: str, flag: str, choices: tuple[str, ...]) -> str:
    """`value`, if it is one of `choices`.

    Raises:
        ConfigError: it is not.
    """
    if value not in choices:
        raise ConfigError(f"`{flag}` is {value!r}, which does not exist", f"choose from: {', '.join(choices)}")
    return value


def in_range(value: Any, flag: str, low: float, high: float) -> Any:
    """`value`, if it is from `low` to `high`.

    Raises:
        ConfigError: it is not.
    """
    if not low <= value <= high:
        raise ConfigError(f"`{flag}` is {value}, outside {low} to {high}", f"choose a value from {low} to {high}")
    return value


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The JSON object in a flag, or in the file it names.

    Raises:
        ConfigError: it is none.
    """
    way = f"""give a JSON object in single quotes, for example `{flag} '{{"drafters": ["history"]}}'`"""
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"`{flag}` is neither a JSON object nor a file with one: {error}", way) from None
    if not isinstance(value, dict):
        raise ConfigError(f"`{flag}` is {value!r}, no object", way)
    return value


def check_writable(path: Path | None, flag: str) -> None:
    """Refuse a file that could not be written, before minutes are spent on what goes in.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"`{flag}` is `{path}`, which is a folder", "name a file")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`{flag}` is `{path}`, whose folder does not exist", "make the folder first")


def _parts(text: str, flag: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"`{flag}` is {text!r}, with nothing between its commas", example)
    return parts


def _example(low: int, high: int) -> str:
    return ",".join(str(value) for value in (1, 4, 16) if low <= value <= high)
