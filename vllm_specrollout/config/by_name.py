"""A class of the user's own by its qualified name, `my.module:Class`, and the options that stand beside the name.

What belongs here: the form of such a name, the import, and the options, which are the keyword-only arguments of the
class: their annotations are checked as fields of the configuration are. What a drafter or a budget must be able to do
is said by its Protocol. stdlib only.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from vllm_specrollout.config.checks import Declared, check_choice, nearest
from vllm_specrollout.errors import ConfigError, named, shown

_PATH = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
QUALIFIED = f"{_PATH}:{_PATH}"
"""`my.module:Class`."""


def is_qualified(name: str) -> bool:
    """Whether it is meant to be a class of the user's."""
    return ":" in name


def check_name(key: str, value: Any, ours: tuple[str, ...]) -> None:
    """A name of ours, or one of a class; whether there is such a class is not asked."""
    if not isinstance(value, str) or not is_qualified(value):
        check_choice(key, value, ours)
    elif not re.fullmatch(QUALIFIED, value):
        raise ConfigError(f"`{key}` names {shown(value)}, which is no class", 'write "my.module:Class"')


def load(key: str, name: str, protocol: type, base: type) -> type:
    """The class.

    Args:
        key: that names it, for messages.
        protocol: whose methods it must have.
        base: what users best inherit from.

    Raises:
        ConfigError: it cannot be imported, or is none.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"`{key}` names `{named(name)}`, which cannot be imported: {type(error).__name__}: {error}",
            "put its folder on PYTHONPATH, where every process of the engine finds it",
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"`{key}` names `{named(name)}`, which is no class", 'write "my.module:Class"')
    methods = [member for member, value in vars(protocol).items() if inspect.isfunction(value)]
    _check_has(key, name, found, methods, base)
    return found


def check_options(key: str, name: str, cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """What its constructor gets by keyword: each value as its annotation says, a list as a tuple.

    Raises:
        ConfigError: an option that it does not take, of another type or out of range; or one that is missing.
    """
    hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    taken = [one for one in inspect.signature(cls).parameters.values() if one.kind is one.KEYWORD_ONLY]
    known = {one.name: one for one in taken}
    for option in options:
        if option not in known:
            near = nearest(option, known)
            way = f"did you mean `{near[0]}`?" if near else f"it takes: {', '.join(known) or 'none'}"
            raise ConfigError(f"`{key}` gives `{name}` an option `{named(option)}` that it does not take", way)
    values = {}
    for option, one in known.items():
        if option not in options:
            if one.default is one.empty:
                raise ConfigError(f"`{key}` does not give `{name}` its option `{option}`", f"add `{option}`")
            continue
        values[option] = options[option]
        if hints.get(option, Any) is not Any:
            declared, place = Declared.by(hints[option]), f"{key}: {name}: {option}"
            declared.check_type(place, options[option])
            values[option] = declared.checked(place, options[option])
    return values


def make(key: str, name: str, protocol: type, base: type, place: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """An object of the class.

    Args:
        key, name, protocol, base: as in `load`.
        place: what its constructor gets before the options.

    Raises:
        ConfigError: it cannot be made, or is not what the Protocol says.
    """
    cls = load(key, name, protocol, base)
    values = check_options(key, name, cls, options)
    try:
        made = cls(*place, **values)
    except ConfigError:
        raise
    except Exception as error:
        cause = f"`{key}` names `{named(name)}`, which cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(
            cause, f"its constructor takes what {base.__name__}'s says, then options by keyword"
        ) from error
    _check_has(key, name, made, [member for member in protocol.__annotations__ if member != "name"], base)
    return made


def _check_has(key: str, name: str, found: Any, members: list[str], base: type) -> None:
    lacking = [member for member in members if not hasattr(found, member)]
    if lacking:
        raise ConfigError(
            f"`{key}` names `{named(name)}`, which has no `{'`, `'.join(lacking)}`",
            f"inherit from `{base.__module__}.{base.__name__}`, which has what most need",
        )
