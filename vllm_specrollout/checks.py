"""Checks of single values, for configurations: each raises one clear error. stdlib only."""

from __future__ import annotations

import difflib
import re
from typing import Any

from vllm_specrollout.errors import ConfigError


def check_field(name: str, value: Any, annotation: Any) -> None:
    text = str(annotation)
    if text.startswith("tuple"):
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise ConfigError(f"`{name}` is {value!r}, not a list", f"write it as a list, for example [{value!r}]")
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
        raise ConfigError(f"`{name}` is {value!r}, of type {type(value).__name__}", f"give a value of type {wanted}")


def check_range(name: str, value: Any, low: int, high: int) -> None:
    check_type(name, value, (int,))
    if not low <= value <= high:
        raise ConfigError(f"`{name}` is {value}, outside {low} to {high}", f"choose a value from {low} to {high}")


def check_real(name: str, value: Any, low: float, high: float) -> None:
    check_type(name, value, (int, float))
    if not low <= value <= high:
        raise ConfigError(
            f"`{name}` is {value}, outside {low:g} to {high:g}", f"choose a value from {low:g} to {high:g}"
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
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        way = f"did you mean `{near[0]}`?" if near else f"choose from: {', '.join(choices)}"
        raise ConfigError(f"`{name}` names {value!r}, which does not exist", way)


def check_devices(devices: tuple[str, ...], *, is_used: bool) -> None:
    """The CPU cores of a drafter's process."""
    for device in devices:
        check_type("devices", device, (str,))
        if not re.fullmatch(r"cpu:\d+(-\d+)?", device):
            raise ConfigError(f"`devices` names {device!r}, which is no core", "name cores as `cpu:1` or `cpu:2-3`")
    if devices and not is_used:
        raise ConfigError(
            f"`devices` is {list(devices)}, and no drafter is started that could have them",
            'drop `devices`, or set {"placement": "decoupled"}; a drafter begun by hand takes `--cores`',
        )
