"""Nobody waits for the disk: what comes is kept in memory at once, and written in the background."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import folder, log
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.keeping import PER_MIB
from vllm_specrollout.history.records import AnswerHead, EpochRecord, RewardRecord
from vllm_specrollout.history.store import HistoryStore

MakeAnswer = Callable[..., Answer]
PATIENCE_S = 60  # no test waits so long unless it fails
PWRITE = os.pwrite


class Disk:
    """Writes wait until they are let go; or, if told so, something else happens first."""

    def __init__(self) -> None:
        self.go, self.is_asked = threading.Event(), threading.Event()
        self.first: Callable[[], object] = lambda: None

    def pwrite(self, *args: object) -> int:
        self.is_asked.set()
        assert self.go.wait(PATIENCE_S)
        first, self.first = self.first, lambda: None
        first()
        return PWRITE(*args)  # type: ignore[arg-type]


class Background:
    """A thread, as in an engine; its errors are this test's."""

    def __init__(self) -> None:
        self._threads, self._tasks = ThreadPoolExecutor(1), list[Future[None]]()

    def __call__(self, task: Callable[[], None]) -> None:
        self._tasks.append(self._threads.submit(task))

    def settle(self) -> None:
        """Wait for all that was given to it, and for what that gives to it."""
        for task in self._tasks:
            task.result(PATIENCE_S)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(os, "pwrite", disk.pwrite)
    yield disk
    disk.go.set()


def opened(path: Path, disk: Disk, **more: object) -> tuple[HistoryStore, Background]:
    """A store whose disk stands still from now on."""
    background = Background()
    disk.go.set()
    store = HistoryStore(HistoryConfig(dir=str(path), **more), background)  # type: ignore[arg-type]
    disk.go.clear()
    disk.is_asked.clear()
    return store, background


def heads(store: HistoryStore) -> list[object]:
    """What is in the store's file: requests' names, rewards and epochs."""
    found: list[object] = []
    for _, head in log.Reader(store._kept.folder.path).records():
        if isinstance(head, AnswerHead):
            found.append(len(found))
        elif isinstance(head, RewardRecord):
            found.append((head.request_id, head.reward))
        elif isinstance(head, EpochRecord):
            found.append(head)
    return found


def names(store: HistoryStore, problem_id: str = "p") -> list[str]:
    return [answer.request_id for answer in answers_in(store, problem_id)]


def test_no_call_waits_for_a_disk_that_stands_still_and_answers_draft_meanwhile(
    tmp_path: Path, disk: Disk, make_answer: MakeAnswer
) -> None:
    store, background = opened(tmp_path, disk)
    store.append(make_answer("a"))
    assert disk.is_asked.wait(PATIENCE_S)
    # the disk has not answered from here on
    store.arrived("p", "running")
    store.append(make_answer("b"))
    store.report_reward("a", 1.0)
    store.report_reward("b", 2.0)
    assert store.begin_epoch(1) == 1
    store.append(make_answer("c", epoch=1))
    store.ended("running")
    assert names(store) == ["a", "b", "c"] and [a.reward for a in answers_in(store, "p")] == [1.0, 2.0, None]
    assert store.stats().waiting == 3 and store.stats().write_errors == 0 and not disk.go.is_set()
    disk.go.set()
    background.settle()
    assert store.stats().waiting == store.stats().memory_bytes == 0 and names(store) == ["a", "b", "c"]
    # "a" was on its way without its reward, and alone; the others were written with theirs
    assert heads(store) == [0, EpochRecord(1), ("a", 1.0), 3, 4]
    store.close()
    again = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert {a.request_id: a.reward for a in answers_in(again, "p")} == {"a": 1.0, "b": 2.0, "c": None}
    assert again.epoch == 1


def test_what_waits_for_a_disk_that_never_comes_back_is_bounded(
    tmp_path: Path, disk: Disk, make_answer: MakeAnswer
) -> None:
    store, background = opened(tmp_path, disk, max_mib=1)
    for number in range(PER_MIB + 50):
        store.append(make_answer(str(number), f"p{number}", count=4))
    assert store.stats().waiting == PER_MIB and store.stats().evicted == 50
    assert not names(store, "p0") and names(store, f"p{PER_MIB + 49}")
    for number in range(50, PER_MIB + 50):
        store.report_reward(str(number), 1.0)
    disk.go.set()
    background.settle()
    assert store.stats().waiting == 0 and store.stats().answers <= PER_MIB
    # the first one was on its way when it was dropped: it is in the file, and nobody's
    assert not names(store, "p0")


def test_closing_writes_what_waits(tmp_path: Path, make_answer: MakeAnswer) -> None:
    tasks: list[Callable[[], None]] = []
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)), background=tasks.append)
    store.append(make_answer("a"))
    store.report_reward("a", 0.5)
    store.begin_epoch(2)
    assert heads(store) == []
    store.close()
    again = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert [(a.request_id, a.reward) for a in answers_in(again, "p")] == [("a", 0.5)] and again.epoch == 2
    # what was due comes too late, and does nothing
    for task in tasks:
        task()
    assert store.stats().write_errors == 0


def test_closing_does_not_wait_for_a_disk_that_stands_still_and_says_what_is_lost(
    tmp_path: Path, disk: Disk, make_answer: MakeAnswer, caplog: pytest.LogCaptureFixture
) -> None:
    store, background = opened(tmp_path, disk)
    for name in "abc":
        store.append(make_answer(name))
    assert disk.is_asked.wait(PATIENCE_S)
    store.close(patience_s=0.0)
    assert not disk.go.is_set() and "stands still: 3 answers are not written" in caplog.text
    # a disk that comes back in time gets them all the same
    disk.go.set()
    background.settle()
    store.close()
    assert names(HistoryStore(HistoryConfig(dir=str(tmp_path)))) == ["a", "b", "c"]


def test_closing_waits_as_long_as_answers_are_written(tmp_path: Path, disk: Disk, make_answer: MakeAnswer) -> None:
    tasks: list[Callable[[], None]] = []
    disk.go.set()
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)), tasks.append)
    disk.go.clear()
    for number in range(5):
        store.append(make_answer(str(number)))
    writing = threading.Thread(target=store.close)
    writing.start()
    disk.go.set()
    writing.join(PATIENCE_S)
    assert not writing.is_alive() and store.stats().waiting == 0


def test_a_reward_that_comes_while_its_answer_is_written_is_written_after_it(
    tmp_path: Path, disk: Disk, make_answer: MakeAnswer
) -> None:
    store, background = opened(tmp_path, disk)
    disk.first = lambda: store.report_reward("a", 7.0)
    disk.go.set()
    store.append(make_answer("a", reward=1.0))
    background.settle()
    assert heads(store) == [0, ("a", 7.0)]


def test_an_answer_that_is_dropped_while_it_is_written_is_nobodys(
    tmp_path: Path, disk: Disk, make_answer: MakeAnswer
) -> None:
    store, background = opened(tmp_path, disk)

    def drop() -> None:
        with store._lock:
            store._kept._drop(list(store._requests.values()))

    disk.first = drop
    disk.go.set()
    store.append(make_answer("a"))
    background.settle()
    assert names(store) == [] and store.stats().answers == store.stats().memory_bytes == 0
    store.append(make_answer("b"))
    background.settle()
    assert names(store) == ["b"] and heads(store) == [0, 1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_whenever_it_is_written_the_same_is_kept_as_if_it_were_at_once(
    tmp_path_factory: pytest.TempPathFactory, make_answer: MakeAnswer, seed: int
) -> None:
    chance, tasks = random.Random(seed), list[Callable[[], None]]()
    paths = [tmp_path_factory.mktemp("history") for _ in range(2)]
    late = HistoryStore(HistoryConfig(dir=str(paths[0]), epochs=2), background=tasks.append)
    at_once = HistoryStore(HistoryConfig(dir=str(paths[1]), epochs=2))
    patch = pytest.MonkeyPatch()
    patch.setattr(folder, "_LEAST_REWRITTEN", 0)
    # of the present epoch: names of older answers are forgotten when the disk has time
    recent: list[str] = []

    def act() -> None:
        what = chance.choice(["append", "append", "reward", "epoch"])
        if what == "append":
            recent.append(f"{late.epoch}-{len(recent)}")
            own = make_answer(recent[-1], f"p{chance.randrange(3)}", epoch=late.epoch, count=chance.randrange(1, 9))
            for store in (late, at_once):
                store.append(own)
        elif what == "reward" and recent:
            name, reward = chance.choice(recent), float(chance.randrange(3))
            assert late.report_reward(name, reward) is at_once.report_reward(name, reward)
        elif what == "epoch" and chance.random() < 0.3:
            assert late.begin_epoch() == at_once.begin_epoch()
            recent.clear()

    is_writing = False

    def amid(*args: object) -> int:
        """While the late one writes, more comes; the disk may be full."""
        nonlocal is_writing
        if is_writing:
            is_writing = False
            if chance.random() < 0.5:
                act()
            is_full = chance.random() < 0.2
            is_writing = True
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(*args)  # type: ignore[arg-type]

    patch.setattr(os, "pwrite", amid)
    try:
        for _ in range(chance.randrange(1, 40)):
            act()
            while tasks and chance.random() < 0.5:
                is_writing = True
                tasks.pop(0)()
                is_writing = False
        for store in (late, at_once):
            store.begin_epoch()
        while tasks:
            tasks.pop(0)()
        found = [_kept(store) for store in (late, at_once)]
        assert found[0] == found[1] and late.stats().waiting == 0
        late.close()
        at_once.close()
        again = [HistoryStore(HistoryConfig(dir=str(path), epochs=2)) for path in paths]
        assert again[0].epoch == again[1].epoch
        assert [_kept(store) for store in again] == found
        for store in again:
            store.close()
    finally:
        patch.undo()


def _kept(store: HistoryStore) -> dict[str, list[tuple[str, float | None, list[int]]]]:
    return {
        name: sorted((a.request_id, a.reward, a.token_ids.tolist()) for a in answers_in(store, name))
        for name in ("p0", "p1", "p2")
    }
