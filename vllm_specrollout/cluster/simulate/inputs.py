"""A study's inputs: values with a mark that says where each one comes from, read from one TOML file.

What belongs here: the file's schema and its checks. The marks are

- `text`: the paper prints the value;
- `derived`: it follows from printed values alone, and `how` says how;
- `free`: the paper does not give it; `how` says what it was fitted to, or why it was set.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specrollout.config.checks import check_choice
from vllm_specrollout.errors import ConfigError

FOLDER = Path(__file__).parent / "inputs"
"""Where the shipped files lie, one per study."""
MARKS = ("text", "derived", "free")

Numbers = float | tuple["Numbers", ...]

_FIELDS = {"value": True, "mark": True, "source": True, "unit": False, "how": False}
_TARGET_FIELDS = {"value": True, "source": True, "unit": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value and where it comes from."""

    name: str
    value: Numbers
    # text, derived or free; empty for a target
    mark: str
    # table or section
    source: str
    unit: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInputs:
    """All that a study is told: `inputs` go into the model, `targets` are what the paper prints of the outcome."""

    title: str
    path: Path
    inputs: Mapping[str, Given]
    targets: Mapping[str, Given]

    def number(self, name: str) -> float:
        """An input that is one number."""
        return _number(self._find(self.inputs, name).value, name, self.path)

    def numbers(self, name: str) -> tuple[float, ...]:
        """An input that is a list of numbers."""
        return _list(self._find(self.inputs, name).value, name, self.path)

    def target(self, name: str) -> float:
        """A printed figure that is one number."""
        return _number(self._find(self.targets, name).value, name, self.path)

    def target_row(self, name: str) -> tuple[float, ...]:
        """Printed figures that are a list of numbers."""
        return _list(self._find(self.targets, name).value, name, self.path)

    def target_table(self, name: str) -> tuple[tuple[float, ...], ...]:
        """Printed figures that are a table."""
        value = self._find(self.targets, name).value
        if not isinstance(value, tuple):
            raise ConfigError(f"`{name}` in `{self.path}` is one number", "give a list of rows")
        return tuple(_list(row, name, self.path) for row in value)

    def _find(self, part: Mapping[str, Given], name: str) -> Given:
        try:
            return part[name]
        except KeyError:
            raise ConfigError(f"`{self.path}` lacks `{name}`", "compare it with the shipped file") from None


def load(study: str, path: Path | None = None) -> StudyInputs:
    """The inputs of a study.

    Args:
        study: its name, for the shipped file.
        path: another file with the same names; None: the shipped one.

    Raises:
        ConfigError: a file that cannot be read, or does not keep to the schema.
    """
    shipped = FOLDER / f"{study}.toml"
    found = read(path or shipped)
    if path is not None:
        _check_same_names(found, read(shipped))
    return found


def read(path: Path) -> StudyInputs:
    """One file, checked.

    Raises:
        ConfigError: it cannot be read, or does not keep to the schema.
    """
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"`{path}` is no TOML file that can be read: {error}", "name a file of inputs") from None
    for key in body:
        check_choice(str(path), key, ("title", "inputs", "targets"))
    if not isinstance(body.get("title"), str):
        raise ConfigError(f"`{path}` has no `title`", 'write `title = "..."` at its head')
    parts = []
    for part, fields in (("inputs", _FIELDS), ("targets", _TARGET_FIELDS)):
        entries = body.get(part, {})
        if not isinstance(entries, dict):
            raise ConfigError(f"`{part}` in `{path}` is no table", f"write `[{part}.NAME]` before each value")
        parts.append({name: _given(name, entry, fields, path) for name, entry in entries.items()})
    return StudyInputs(title=body["title"], path=path, inputs=parts[0], targets=parts[1])


def _given(name: str, entry: Any, fields: Mapping[str, bool], path: Path) -> Given:
    where = f"`{name}` in `{path}`"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is {entry!r}, no table", "give value, mark and source")
    for key in entry:
        check_choice(where, key, tuple(fields))
    for key, is_needed in fields.items():
        if is_needed and key not in entry:
            raise ConfigError(
                f"{where} has no `{key}`", f"each value needs: {', '.join(k for k in fields if fields[k])}"
            )
    for key in set(entry) - {"value"}:
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise ConfigError(f"`{key}` of {where} is {entry[key]!r}, no text", "write it in quotes")
    mark = entry.get("mark", "")
    if "mark" in fields:
        check_choice(f"mark of {name}", mark, MARKS)
        if mark != "text" and "how" not in entry:
            raise ConfigError(
                f"{where} is `{mark}` and has no `how`", "say what it follows from, or what it was fitted to"
            )
    return Given(
        name=name,
        value=_numbers(entry["value"], where),
        mark=mark,
        source=entry["source"],
        unit=entry.get("unit", ""),
        how=entry.get("how", ""),
    )


def _numbers(value: Any, where: str) -> Numbers:
    if isinstance(value, list) and value:
        return tuple(_numbers(one, where) for one in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"the value of {where} holds {value!r}", "give a finite number, or a list of them")
    return float(value)


def _number(value: Numbers, name: str, path: Path) -> float:
    if isinstance(value, tuple):
        raise ConfigError(f"`{name}` in `{path}` is a list", "give one number")
    return value


def _list(value: Numbers, name: str, path: Path) -> tuple[float, ...]:
    if not isinstance(value, tuple):
        raise ConfigError(f"`{name}` in `{path}` is one number", "give a list of numbers")
    return tuple(_number(one, name, path) for one in value)


def _check_same_names(found: StudyInputs, shipped: StudyInputs) -> None:
    for part in ("inputs", "targets"):
        own, known = getattr(found, part), getattr(shipped, part)
        for name in own:
            check_choice(f"{part} of {found.path}", name, tuple(known))
        for name in known:
            if name not in own:
                raise ConfigError(f"`{found.path}` lacks `{part}.{name}`", f"copy it from `{shipped.path}`")
