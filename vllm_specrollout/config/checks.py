"""Checks of what is set, by what a dataclass's fields are annotated with or one by one; each raises one clear error."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from vllm_specrollout.config import envs
from vllm_specrollout.config.devices import FORM, parse_devices
from vllm_specrollout.errors import ConfigError, shown, shown_path

_ADDRESS = "`ipc://PATH` or `tcp://HOST:PORT`"
MOST_ID = 256
"""Characters of an id that clients choose, at most."""
MOST_PATH = 4096
"""Characters of a path, at most."""


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `low` to `high`, of their type."""

    low: float
    high: float
    # what is suggested instead of these; empty: a value between them
    way: str = ""

    def check(self, name: str, value: Any) -> Any:
        check_range(name, value, self.low, self.high, self.way)
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> Any:
        check_choice(name, value, self.names)
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.names)}


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Anything else: `check` gives what is kept of a value, `schema` says of it what JSON schema can."""

    check: Callable[[str, Any], Any]
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Declared:
    """What a field is annotated with: `Annotated[int | None, Range(1, 64)]`, taken apart."""

    types: tuple[type, ...]
    is_optional: bool
    rules: tuple[Any, ...]
    # a dataclass of its own; and what a list holds
    nested: Any = None
    item: Declared | None = None

    @classmethod
    def by(cls, hint: Any) -> Declared:
        kind, *rules = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
        types = {get_origin(one) or one for one in kinds}
        item = next((cls.by(get_args(one)[0]) for one in kinds if get_origin(one) is tuple), None)
        nested = next((one for one in kinds if is_dataclass(one)), None)
        allowed = types - {NoneType} | ({int} if float in types else set())
        return cls(tuple(allowed), NoneType in types, tuple(rules), nested, item)

    def check_type(self, name: str, value: Any) -> None:
        """Not of what a list holds, nor of what is a dataclass of its own."""
        if self.item is not None:
            if not isinstance(value, (list, tuple)):
                way = f"write it as a list, for example [{shown(value)}]"
                raise ConfigError(f"`{name}` is {shown(value)}, not a list", way)
        elif self.nested is None and not (self.is_optional and value is None):
            check_type(name, value, self.types)

    def checked(self, name: str, value: Any) -> Any:
        """The value by its rules: a list becomes a tuple, and `~` in a path the user's folder."""
        if self.is_optional and value is None:
            return None
        if self.item is not None:
            return tuple([self.item.checked(name, one) for one in value])
        for rule in self.rules:
            value = rule.check(name, value)
        return value


def declared(cls: type) -> dict[str, Declared]:
    """What users can set in a configuration's dataclass."""
    if cls not in _DECLARED:
        hints = get_type_hints(cls, include_extras=True)
        _DECLARED[cls] = {f.name: Declared.by(hints[f.name]) for f in fields(cls) if not f.metadata.get("is_derived")}
    return _DECLARED[cls]


_DECLARED: dict[type, dict[str, Declared]] = {}


def check_fields(config: Any, prefix: str = "") -> None:
    """Check a frozen dataclass by what its fields are annotated with.

    Args:
        prefix: of its fields' names, for messages.
    """
    for name, one in declared(type(config)).items():
        value = getattr(config, name)
        one.check_type(prefix + name, value)
        if one.rules or one.item:
            object.__setattr__(config, name, one.checked(prefix + name, value))


def check_type(name: str, value: Any, allowed: tuple[type, ...]) -> None:
    # bool is an int to Python, but not to a user
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(sorted({t.__name__ for t in allowed}))
        raise ConfigError(
            f"`{name}` is {shown(value)}, of type {type(value).__name__}", f"give a value of type {wanted}"
        )


def check_range(name: str, value: Any, low: float, high: float, way: str = "") -> None:
    """A number from `low` to `high`, a whole one where these are."""
    is_real = isinstance(low, float)
    check_type(name, value, (int, float) if is_real else (int,))
    if not low <= value <= high:
        limits = f"{low:g} to {high:g}" if is_real else f"{low} to {high}"
        raise ConfigError(f"`{name}` is {shown(value)}, outside {limits}", way or f"choose a value from {limits}")


def check_finite(name: str, value: Any) -> float:
    """A reward: any number that is finite."""
    # True is 1 to Python; here it is more likely a comparison that was meant to be a score
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"`{name}` is {shown(value)}, of type {type(value).__name__}", "give a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"`{name}` is {number}, not a finite number", "leave answers without a reward out")
    return number


def check_order(config: Any, prefix: str, low: str, high: str) -> None:
    """Refuse a lower bound that is above the upper one, both fields of a configuration."""
    least, most = getattr(config, low), getattr(config, high)
    if least > most:
        cause = f"`{prefix}{low}` is {least:g}, above `{prefix}{high}` {most:g}"
        raise ConfigError(cause, f"lower `{low}` or raise `{high}`")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        near = nearest(value, choices)
        way = f"did you mean `{near[0]}`?" if near else f"choose from: {', '.join(choices)}"
        raise ConfigError(f"`{name}` names {shown(value)}, which does not exist", way)


def nearest(given: Any, known: Iterable[str]) -> list[str]:
    """The known name that the given one was perhaps meant to be; none: nothing resembles it."""
    # what is far longer than all of them resembles none, and comparing takes time
    is_name = isinstance(given, str) and len(given) <= 64
    return difflib.get_close_matches(given, known, n=1, cutoff=0.6) if is_name else []


def check_path(name: str, value: Any) -> str:
    """A path as it was given, with the user's folder in the place of `~`; the empty one stands for none."""
    check_type(name, value, (str,))
    if "\0" in value or len(value) > MOST_PATH or (value and not value.strip()):
        raise ConfigError(f"`{name}` is {shown_path(value)}, which is no path", "name a file or folder")
    path = os.path.expanduser(value)
    if path.startswith("~"):
        raise ConfigError(f"`{name}` is {shown_path(value)}, and there is no such user", "write the path out")
    return path


def check_id(name: str, value: Any) -> str:
    """An id that clients choose. The empty one stands for none."""
    check_type(name, value, (str,))
    if len(value) > MOST_ID:
        cause = f"`{name}` has {len(value)} characters, above {MOST_ID}"
        raise ConfigError(cause, "give a shorter one, such as a hash of it")
    if "\0" in value or not is_text(value):
        cause = f"`{name}` is {shown(value)}, with a character that is none (NUL, or half a surrogate pair)"
        raise ConfigError(cause, "leave it out")
    return str(value)


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


def check_device(name: str, value: Any) -> str:
    """What a process runs on."""
    check_type(name, value, (str,))
    parse_devices(name, value)
    return str(value)


def check_name(name: str, value: Any) -> str:
    """A name that can be part of a file's. The empty one stands for none."""
    check_type(name, value, (str,))
    if value and not re.fullmatch(_NAME, value):
        raise ConfigError(f"`{name}` is {shown(value)}", "use 1 to 64 letters, digits, `.`, `_` and `-`")
    return str(value)


_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
NAME = FieldRule(check_name, {"pattern": f"^({_NAME})?$"})
ID = FieldRule(check_id, {"maxLength": MOST_ID})
FILE = FieldRule(check_path, {"maxLength": MOST_PATH})
DEVICE = FieldRule(check_device, {"pattern": f"^{FORM}$"})


def check_address(name: str, value: str, serves: bool = False) -> None:
    """See that an address can be used as far as its text says; the empty one stands for none.

    Args:
        serves: whether it is the end that serves, which may leave its host open.

    Raises:
        ConfigError: it is none, or has a key in it, which is not repeated.
    """
    kind, _, rest = value.partition("://")
    host, slash, _ = rest.partition("/")
    if value and kind not in ("ipc", "tcp"):
        raise ConfigError(f"`{name}` is {shown(value)}", f"give {_ADDRESS}, or leave it out")
    if kind != "tcp":
        return
    if slash:
        cause = f"`{name}` has something behind `tcp://{host[:80]}`: a key has no place in an address, which is logged"
        raise ConfigError(cause, f"write tcp://HOST:PORT, and name a file with the key, or set `{envs.KEY}`")
    if not serves and host.rpartition(":")[0] in ("*", "0.0.0.0", "[::]"):
        cause = f"`{name}` is {shown(value)}, which says where it listens and not where it is"
        raise ConfigError(cause, "name the host on which it runs, as its command prints it")
