"""From the text of a flag to checked values. Pure; a mistake is a `ConfigError` that names flag, value and limit."""

from __future__ import annotations

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


def in_range(value: int, flag: str, low: int, high: int) -> int:
    """`value`, if it is from `low` to `high`.

    Raises:
        ConfigError: it is not.
    """
    if not low <= value <= high:
        raise ConfigError(f"`{flag}` is {value}, outside {low} to {high}", f"choose a value from {low} to {high}")
    return value


def _parts(text: str, flag: str, example: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"`{flag}` is {text!r}, with nothing between its commas", example)
    return parts


def _example(low: int, high: int) -> str:
    return ",".join(str(value) for value in (1, 4, 16) if low <= value <= high)
