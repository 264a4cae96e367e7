"""Checks of single values, for configurations: each raises one clear error. stdlib only."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from vllm_specrollout.errors import ConfigError, shown, shown_path

MOST_ID = 256
"""Characters of an id that clients choose, at most."""
MOST_PATH = 4096
"""Characters of a path, at most."""


def check_field(name: str, value: Any, annotation: Any) -> None:
    text = str(annotation)
    if text.startswith("tuple"):
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ConfigError(
                f"`{name}` is {shown(value)}, not a list", f"write it as a list, for example [{shown(value)}]"
            )
        return
    allowed: tuple[type, ...] = ()
    if text.startswith("dict"):
        allowed = (dict,)
    for kind, types in (("bool", (bool,)), ("int", (int,)), ("float", (int, float)), ("str", (str,))):
        if kind in text and allowed != (dict,):
            allowed += types
    if "None" in text and value is None:
        return
    check_type(name, value, allowed)


def check_type(name: str, value: Any, allowed: tuple[type, ...]) -> None:
    # bool is an int to Python, but not to a user
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(sorted({t.__name__ for t in allowed}))
        raise ConfigError(
            f"`{name}` is {shown(value)}, of type {type(value).__name__}", f"give a value of type {wanted}"
        )


def check_range(name: str, value: Any, low: int, high: int) -> None:
    check_type(name, value, (int,))
    if not low <= value <= high:
        raise ConfigError(
            f"`{name}` is {shown(value)}, outside {low} to {high}", f"choose a value from {low} to {high}"
        )


def check_real(name: str, value: Any, low: float, high: float) -> None:
    check_type(name, value, (int, float))
    if not low <= value <= high:
        raise ConfigError(
            f"`{name}` is {shown(value)}, outside {low:g} to {high:g}", f"choose a value from {low:g} to {high:g}"
        )


def check_match(drafter: str, min_match: int, max_match: int) -> None:
    """The shortest and the longest context that a drafter looks up."""
    check_range(f"{drafter}.min_match", min_match, 1, 64)
    check_range(f"{drafter}.max_match", max_match, 1, 64)
    if min_match > max_match:
        raise ConfigError(
            f"`{drafter}.min_match` is {min_match}, above `{drafter}.max_match` {max_match}",
            "lower `min_match` or raise `max_match`",
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        near = nearest(value, choices)
        way = f"did you mean `{near[0]}`?" if near else f"choose from: {', '.join(choices)}"
        raise ConfigError(f"`{name}` names {shown(value)}, which does not exist", way)


def nearest(given: Any, known: Iterable[str]) -> list[str]:
    """The known name that the given one was perhaps meant to be; none: nothing resembles it."""
    # what is far longer than all of them resembles none, and comparing takes time
    is_name = isinstance(given, str) and len(given) <= 64
    return difflib.get_close_matches(given, known, n=1, cutoff=0.4) if is_name else []


def check_path(name: str, value: Any) -> str:
    """A path as it was given, with the user's folder in the place of `~`; the empty one stands for none."""
    check_type(name, value, (str,))
    if "\0" in value or len(value) > MOST_PATH or (value and not value.strip()):
        raise ConfigError(f"`{name}` is {shown_path(value)}, which is no path", "name a file or folder")
    path = os.path.expanduser(value)
    if path.startswith("~"):
        raise ConfigError(f"`{name}` is {shown_path(value)}, and there is no such user", "write the path out")
    return path


def check_id(name: str, value: Any) -> None:
    """An id that clients choose. The empty one stands for none."""
    check_type(name, value, (str,))
    if len(value) > MOST_ID:
        cause = f"`{name}` has {len(value)} characters, above {MOST_ID}"
        raise ConfigError(cause, "give a shorter one, such as a hash of it")
    if "\0" in value or not is_text(value):
        cause = f"`{name}` is {shown(value)}, with a character that is none (NUL, or half a surrogate pair)"
        raise ConfigError(cause, "leave it out")


def is_text(value: str) -> bool:
    """Whether a text can be encoded: JSON may hold half a surrogate pair, and nothing else can."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_is_on(name: str, given: Any, is_on: bool, why_off: str, way: str) -> None:
    """Refuse settings (a dataclass with defaults) of a part that is off: they would do nothing, and say nothing."""
    for f in () if is_on else fields(given):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if getattr(given, f.name) != default:
            raise ConfigError(f"`{name}.{f.name}` is set, and {why_off}", f"{way}, or drop `{name}`")


def check_devices(devices: tuple[str, ...], *, is_used: bool) -> None:
    """The CPU cores of a drafter's process."""
    for device in devices:
        check_type("devices", device, (str,))
        if not re.fullmatch(r"cpu:[0-9]{1,6}(-[0-9]{1,6})?", device):
            raise ConfigError(
                f"`devices` names {shown(device)}, which is no core", "name cores as `cpu:1` or `cpu:2-3`"
            )
    if devices and not is_used:
        raise ConfigError(
            f"`devices` is {shown(list(devices))}, and no drafter is started that could have them",
            'drop `devices`, or set {"placement": "decoupled"}; a drafter begun by hand takes `--cores`',
        )
