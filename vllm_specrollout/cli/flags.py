"""Flags' text turned into checked values, where a mistake names flag, value and limit; and the tables of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_specrollout.errors import ConfigError


def integers(text: str, flag: str, low: int, high: int) -> tuple[int, ...]:
    """`1,4,16` -> (1, 4, 16), in ascending order.

    Raises:
        ConfigError: not a list of different whole numbers from low to high.
    """
    example = ",".join(str(value) for value in (1, 4, 16) if low <= value <= high)
    example = f"give whole numbers from {low} to {high}, for example `{flag} {example}`"
    values = _numbers(text, flag, int, low, high, example)
    if twice := [value for value in values if values.count(value) > 1]:
        raise ConfigError(f"`{flag}` holds {twice[0]} twice", "name each value once")
    return tuple(sorted(values))


def probabilities(text: str, flag: str) -> tuple[float, ...]:
    """`0.6,0.2` -> (0.6, 0.2), the probability of each rank.

    Raises:
        ConfigError: not a list of numbers from 0 to 1 with a sum of at most 1.
    """
    values = _numbers(text, flag, float, 0, 1, f"give one probability per rank, for example `{flag} 0.6,0.2`")
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


def json_object(text: str, flag: str, example: str = '{"drafters": ["history"]}') -> dict[str, Any]:
    """The JSON object in a flag, or in the file it names.

    Raises:
        ConfigError: it is none.
    """
    way = f"give a JSON object in single quotes, for example `{flag} '{example}'`"
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


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> Console:
    """Print a table, its first column to the left, and return what printed it: wide where it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    return console


def _numbers(text: str, flag: str, kind: Callable[[str], Any], low: int, high: int, example: str) -> list[Any]:
    """Each part of a list as a number from `low` to `high`."""
    values = []
    for part in _parts(text, flag, example):
        try:
            value = kind(part)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise ConfigError(f"`{flag}` holds {part!r}, which is no {what}", example) from None
        if not low <= value <= high:
            raise ConfigError(f"`{flag}` holds {part}, outside {low} to {high}", example)
        values.append(value)
    return values


def _parts(text: str, flag: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"`{flag}` is {text!r}, with nothing between its commas", example)
    return parts
