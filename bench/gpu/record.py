"""The rows so far, on disk after every change: whatever ends this process costs at most the row under way."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "first-hour.json"
SCHEMA = 2
"""Changes when a field changes its meaning or goes away."""
ATTEMPTS = 2
"""A row that failed, or in which everything ended, is begun so often and no oftener: those behind it matter too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a row is to measure."""

    # what a reader knows it by
    name: str
    # all that its figures depend on, besides versions, code and device; JSON types
    params: Mapping[str, Any]
    # seconds after which it is given up
    limit_s: float
    # seconds that it may well take: it is not begun with less time left
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that share a process, and what that process sets up once for all of them."""

    step: str
    name: str
    # "module:class" of a `child.Rows`
    runner: str
    setup: Mapping[str, Any] = field(default_factory=dict)
    # variables of the process and of all below it
    environment: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[Task, ...]
    # as those of a task, until it is set up
    limit_s: float
    expected_s: float
    # processes lost one after the other that end it: what is wrong then is not the row
    patience: int = 2

    @property
    def title(self) -> str:
        return self.step if self.name == self.step else f"{self.step}, {self.name}"


@dataclass(slots=True, kw_only=True)
class Row:
    """One row; docs/gpu.md says what its values mean."""

    key: str
    step: str
    name: str
    params: Mapping[str, Any]
    # what else it depends on: code, versions, device
    identity: Mapping[str, Any]
    # of the code, where it is known; its digest is part of the identity
    commit: str | None = None
    # `done`, `failed`, or `begun`: under way, or cut off with everything
    state: str = "begun"
    attempts: int = 0
    # UTC, of the last attempt
    began: str = ""
    seconds: float | None = None
    # None: nothing was to be checked, or the check did not come about
    is_right: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    trace: str = ""

    @property
    def may_begin(self) -> bool:
        return self.state != "done" and self.attempts < ATTEMPTS


def key_of(step: str, params: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """A row's key: the same parameters, measured by the same code with the same versions on the same device."""
    text = json.dumps([step, params, identity], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Record:
    """All rows, of this start and earlier ones.

    Args:
        folders: where the file is kept, the first one being the result; all are read.
        earlier: folders that are only read, the results of earlier starts.
        identity: what rows of this start depend on besides their parameters.
        head: what stands in the file above the rows.
    """

    def __init__(
        self, folders: Sequence[Path], earlier: Sequence[Path], identity: Mapping[str, Any], head: Mapping[str, Any]
    ) -> None:
        self._folders, self._identity, self._head = folders, identity, head
        self.path = folders[0] / FILE
        self.notes: list[str] = []
        self._rows: dict[str, Row] = {}
        for folder in (*earlier, *reversed(folders)):
            self._read(folder / FILE)

    def row(self, part: Part, task: Task) -> Row:
        """The task's row, new or as it was left."""
        key = key_of(part.step, task.params, self._identity)
        fresh = Row(key=key, step=part.step, name=task.name, params=task.params, identity=self._identity)
        return self._rows.setdefault(key, fresh)

    def rows(self, parts: Iterable[Part]) -> list[Row]:
        """What was begun of these parts, in their order."""
        return [row for part in parts for task in part.tasks if (row := self.row(part, task)).attempts]

    def begin(self, row: Row) -> None:
        row.state, row.error, row.trace = "begun", "", ""
        row.attempts += 1
        row.commit = self._head.get("versions", {}).get("commit")
        row.began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.write()

    def end(self, row: Row, values: Mapping[str, Any], seconds: float) -> None:
        row.state, row.values, row.seconds = "done", dict(values), round(seconds, 3)
        row.is_right = row.values.pop("is_right", None)
        self.write()

    def fail(self, row: Row, error: str, trace: str, seconds: float) -> None:
        row.state, row.error, row.trace, row.seconds = "failed", error, trace, round(seconds, 3)
        self.write()

    def write(self) -> None:
        """All of it, in every folder; a reader finds the old file or the new one."""
        rows = [asdict(row) for row in self._rows.values() if row.attempts]
        body = {"schema": SCHEMA, **self._head, "rows": rows, "notes": list(dict.fromkeys(self.notes))}
        text = json.dumps(body, indent=1) + "\n"
        for folder in self._folders:
            scratch = folder / f"{FILE}.new"
            with scratch.open("w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(scratch, folder / FILE)

    def _read(self, path: Path) -> None:
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in body["rows"]] if body["schema"] == SCHEMA else []
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.notes.append(f"`{path}` could not be read, so its rows are measured again: {error}")
            return
        for row in rows:
            known = self._rows.get(row.key)
            if known is None or (row.state == "done", row.attempts) >= (known.state == "done", known.attempts):
                self._rows[row.key] = row
