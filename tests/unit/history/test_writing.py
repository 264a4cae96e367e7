"""Nobody waits for the disk: what comes is kept in memory at once, and written in the background."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.database import Database, Reward, row_of
from vllm_specrollout.history.store import PER_MIB, HistoryStore

PATIENCE_S = 60  # no test waits so long unless it fails
WRITE = Database.write


class Disk:
    """Writes wait until they are let go; or, if told so, something else happens first."""

    def __init__(self) -> None:
        self.go, self.is_asked = threading.Event(), threading.Event()
        self.first: Callable[[], object] = lambda: None

    def write(self, database: Database, *what: Sequence[object]) -> list[int]:
        self.is_asked.set()
        assert self.go.wait(PATIENCE_S)
        first, self.first = self.first, lambda: None
        first()
        return WRITE(database, *what)  # type: ignore[arg-type]


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
    monkeypatch.setattr(Database, "write", lambda *args: disk.write(*args))
    yield disk
    disk.go.set()


@pytest.fixture
def opened(tmp_path: Path, disk: Disk) -> tuple[HistoryStore, Background]:
    """A store of little memory, whose disk stands still."""
    background = Background()
    return HistoryStore(HistoryConfig(dir=str(tmp_path), max_mib=1), background), background


def found(store: HistoryStore, problem_id: str = "p") -> list[tuple[str, float | None]]:
    return [(answer.request_id, answer.reward) for answer in answers_in(store, problem_id)]


def test_no_call_waits_for_a_disk_that_stands_still_and_answers_draft_meanwhile(tmp_path, opened, disk, make_answer):
    store, background = opened
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
    assert found(store) == [("a", 1.0), ("b", 2.0), ("c", None)]
    assert store.stats().waiting == 3 and store.stats().write_errors == 0 and not disk.go.is_set()
    disk.go.set()
    background.settle()
    assert store.stats().waiting == 0
    store.close()
    again = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    # "a" was on its way without its reward, which came after it
    assert found(again) == [("a", 1.0), ("b", 2.0), ("c", None)] and again.epoch == 1


def test_what_is_counted_as_written_is_found_by_whoever_opens_the_file_next_and_is_on_disk_when_an_epoch_begins(
    tmp_path, make_answer
):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path / "kept")))
    for number in range(20):
        store.append(make_answer(f"{number}"))
        assert store.stats().waiting == 0
    # as after a kill: the files as they are
    shutil.copytree(tmp_path / "kept", tmp_path / "killed")
    assert len(found(HistoryStore(HistoryConfig(dir=str(tmp_path / "killed"))))) == 20
    store.begin_epoch()
    # as after a power cut: nothing but what was synced
    (tmp_path / "cut").mkdir()
    shutil.copy(tmp_path / "kept" / "answers-0000.history", tmp_path / "cut")
    assert len(found(HistoryStore(HistoryConfig(dir=str(tmp_path / "cut"))))) == 20


def test_what_waits_for_a_disk_that_never_comes_back_is_bounded(opened, disk, make_answer):
    store, background = opened
    for number in range(PER_MIB + 50):
        store.append(make_answer(str(number), f"p{number}", count=4))
    assert store.stats().waiting == PER_MIB and store.stats().evicted == 50
    assert not found(store, "p0") and found(store, f"p{PER_MIB + 49}")
    for number in range(50, PER_MIB + 50):
        store.report_reward(str(number), 1.0)
    disk.go.set()
    background.settle()
    assert store.stats().waiting == 0 and store.stats().answers <= PER_MIB


def test_what_waits_is_bounded_in_bytes_and_the_newest_stays_however_large(opened, disk, make_answer):
    store, background = opened
    for number in range(20):
        store.append(make_answer(str(number), count=50_000))
    assert store.stats().memory_bytes <= 1 << 20 and store.stats().evicted == 20 - store.stats().waiting > 5
    store.append(make_answer("large", count=1_000_000))
    assert [name for name, _ in found(store)] == ["large"]
    disk.go.set()
    background.settle()
    assert store.stats().waiting == 0


def test_closing_does_not_wait_for_a_disk_that_stands_still_and_says_what_is_lost(
    tmp_path, opened, disk, make_answer, caplog
):
    store, background = opened
    for name in "abc":
        store.append(make_answer(name))
    assert disk.is_asked.wait(PATIENCE_S)
    store.close(patience_s=0.0)
    assert not disk.go.is_set() and "stands still: 3 answers are not written" in caplog.text
    # a disk that comes back in time gets them all the same
    disk.go.set()
    background.settle()
    store.close()
    assert [name for name, _ in found(HistoryStore(HistoryConfig(dir=str(tmp_path))))] == ["a", "b", "c"]


@pytest.mark.parametrize("reward", [None, 1.0])
def test_a_reward_that_comes_while_its_answer_is_written_is_written_after_it(
    tmp_path, opened, disk, make_answer, reward
):
    store, background = opened
    disk.first = lambda: store.report_reward("a", 7.0)
    disk.go.set()
    store.append(make_answer("a", reward=reward))
    background.settle()
    assert found(store) == [("a", 7.0)] and not store._due
    store.close()
    assert found(HistoryStore(HistoryConfig(dir=str(tmp_path)))) == [("a", 7.0)]


def test_a_reward_never_reaches_another_answer_that_has_its_number_by_now(tmp_path, make_answer):
    database = Database(tmp_path / "a.history", writes=True)
    row = row_of(make_answer("a"))
    (number,) = database.write([row], (), None)
    database.drop_oldest(1)
    assert database.write([row], (), None)[0] > number, "none is given out twice"
    database.drop_oldest(1)
    database.put([(number, row._replace(request=b"b"))], [Reward(1.0, number, b"a")], None)
    database.write((), [Reward(1.0, number, b"a")], None)
    assert [(one.request, one.reward) for one in database.rows()] == [(b"b", None)]


def test_a_batch_that_fails_on_its_way_is_written_whole_later_and_once(tmp_path, make_answer):
    tasks: list[Callable[[], None]] = []
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)), background=tasks.append)
    own = store._folder.own._connection
    own.execute(f"PRAGMA max_page_count={own.execute('PRAGMA page_count').fetchone()[0] + 3}")
    for number in range(30):
        store.append(make_answer(str(number), count=500))
    tasks.pop(0)()
    assert store.stats().write_errors == 1 and store.stats().waiting == 30 and len(found(store)) == 30
    own.execute("PRAGMA max_page_count=100000")
    store.close()
    assert len(found(HistoryStore(HistoryConfig(dir=str(tmp_path))))) == 30


def test_looking_up_answers_does_not_wait_for_who_writes_and_sees_no_half_of_it(tmp_path, make_answer):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    store.append(make_answer("a"))
    with store._folder.own._transaction():
        store._folder.own._connection.execute("DELETE FROM answers")
        assert [name for name, _ in found(store)] == ["a"]
    assert found(store) == []


@pytest.mark.parametrize("is_on_disk", [True, False], ids=["a file", "in memory"])
def test_answers_go_to_disk_while_others_read_all_the_time(tmp_path, make_answer, is_on_disk):
    database = Database(tmp_path / "own.history" if is_on_disk else None, writes=True)
    database.write([row_of(make_answer("a"))] * 2000, [], None)
    begun, over = threading.Event(), threading.Event()

    def read() -> int:
        while not over.is_set():
            assert len(database.places(b"p", 0, 2000)) == 2000
            begun.set()
        return database.counts(0).answers

    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(read)
        try:
            assert begun.wait(PATIENCE_S)
            for _ in range(50):
                database.sync()
            database.compact()
        finally:
            over.set()
        assert reader.result(PATIENCE_S) == 2000
