"""What takes long is done without the lock that the engine's calls want, or a few answers at a time."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import folder, keeping, table, turns
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.table import Place, Table

MakeAnswer = Callable[..., Answer]
AT_ONCE = 10


class WatchedLock:
    """Counts what is done to single answers while it is held, and notes what must not be done then."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._count = 0
        self.most = 0
        self.forbidden: list[str] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self.most, self._count = max(self.most, self._count), 0
        self._lock.release()

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self._count += self._depth > 0
            return function(*args, **more)

        return call

    def forbid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if self._depth:
                self.forbidden.append(function.__name__)
            return function(*args, **more)

        return call


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> WatchedLock:
    lock = WatchedLock()
    monkeypatch.setattr(threading, "RLock", lambda: lock)
    monkeypatch.setattr(turns, "AT_ONCE", AT_ONCE)
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    for name in ("place", "row", "move", "add"):
        monkeypatch.setattr(Table, name, lock.counted(getattr(Table, name)))
    for name in ("lexsort", "argsort"):
        monkeypatch.setattr(np, name, lock.forbid(getattr(np, name)))
    for name in ("pread", "pwrite", "fsync", "rename"):
        monkeypatch.setattr(os, name, lock.forbid(getattr(os, name)))
    return lock


@pytest.mark.parametrize("where", ["in memory", "on disk"])
@pytest.mark.parametrize("num_problems", [1, 100])
def test_no_call_holds_the_lock_for_long_or_while_it_sorts_or_reads(
    tmp_path: Path,
    make_answer: MakeAnswer,
    monkeypatch: pytest.MonkeyPatch,
    lock: WatchedLock,
    where: str,
    num_problems: int,
) -> None:
    monkeypatch.setattr(keeping, "PER_MIB", 400)
    store = HistoryStore(HistoryConfig(dir="" if where == "in memory" else str(tmp_path), epochs=1, max_mib=1))
    for number in range(450):
        store.append(make_answer(str(number), f"p{number % num_problems}", count=3))
    assert len(answers_in(store, "p0")) == len(store.find("p0")) >= 300 // num_problems
    assert len(store.find(None)) == store.stats().answers >= 300
    # half is too old, then all is, and the file is written anew
    store.begin_epoch(1)
    for number in range(150):
        store.append(make_answer(f"later-{number}", "p0", epoch=1, count=30))
    store.begin_epoch(2)
    assert store.stats().answers == 150
    store.begin_epoch(9)
    assert store.stats().answers == store.stats().problems == 0
    store.close()
    # a few looks at each of them
    assert 0 < lock.most <= 4 * AT_ONCE and not lock.forbidden


def test_files_that_are_gone_are_forgotten_a_few_answers_at_a_time(
    tmp_path: Path, make_answer: MakeAnswer, lock: WatchedLock
) -> None:
    other, store = (HistoryStore(HistoryConfig(dir=str(tmp_path))) for _ in range(2))
    for number in range(200):
        other.append(make_answer(str(number), count=3))
    other.close()
    store.begin_epoch()
    assert len(store.find("p")) == 200
    other._kept.folder.path.unlink()
    store.begin_epoch()
    assert store.find("p") == [] and lock.most <= 4 * AT_ONCE


def test_an_answer_that_is_dropped_while_others_are_looked_for_is_left_out(
    make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "AT_ONCE", 1)
    store = HistoryStore(HistoryConfig(epochs=0))
    for name in "ab":
        store.append(make_answer(name))
    # between the two
    monkeypatch.setattr(turns.time, "sleep", lambda _: store.begin_epoch() if store.epoch == 0 else None)
    assert [store.read(located).request_id for located in store.find("p")] == ["a"]
    assert store.find("p") == []


class Unsearched(array):  # type: ignore[type-arg]
    """No answer is looked for among all of its problem's."""

    def remove(self, _: int) -> None:
        raise AssertionError

    index = remove  # type: ignore[assignment]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 30)), max_size=60))
def test_whatever_is_dropped_a_problems_answers_come_by_epoch_and_in_the_order_they_came(
    steps: list[tuple[int, int, int]],
) -> None:
    rows, known = Table(), dict[int, tuple[int, int, int]]()
    for number, (problem, epoch, victim) in enumerate(steps):
        row = rows.add(problem, Place(0, number, number, epoch, None, 1))
        known[row] = (problem, epoch, number)
        rows._rows[problem] = Unsearched("i", rows._rows[problem])
        if victim in known:
            assert rows.drop([victim])[0].offset == known.pop(victim)[2]
    for asked in (0, 1, 2, 3, None):
        wanted = sorted((epoch, n) for problem, epoch, n in known.values() if asked in (problem, None))
        found = rows.of_problem(asked).oldest_first()
        assert list(zip(found.epochs.tolist(), found.offsets.tolist(), strict=True)) == wanted
        assert [rows.place(rows.row(ticket)).offset for ticket in found.tickets()] == [n for _, n in wanted]
    assert rows.num_problems == len({problem for problem, _, _ in known.values()}) and len(rows) == len(known)


def test_the_table_is_as_wide_as_it_says() -> None:
    rows = Table()
    for number in range(1000):
        rows.add(number % 7, Place(0, number, number, 0, None, 1))
    widths = sum(column.itemsize for column in vars(rows).values() if isinstance(column, array)) + array("i").itemsize
    assert "some 60 bytes" in (table.__doc__ or "") and widths <= 64
