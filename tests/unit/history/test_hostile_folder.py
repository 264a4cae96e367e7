"""Whatever lies in the directory, an engine starts, says once what it leaves out, and keeps its own answers."""

import contextlib
import errno
import fcntl
import logging
import os
import random
import sqlite3
import stat
import tempfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.unit.history.poisoned import OURS, THEIRS, change, filled, poison
from tests.unit.history.stored import answers_in, answers_of, names
from vllm_specrollout._core import HistoryIndex
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import tokens, upkeep
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.database import Database, HistoryError, row_of
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore


def test_a_poisoned_directory_is_served_from_and_named_once(tmp_path, make_answer, caplog):
    assert poison(tmp_path, make_answer("good")) == 53
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    with caplog.at_level(logging.WARNING):
        store = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=1), vocabulary=OURS)
        assert names(store) == ["good"]
        for epoch in range(1, 9):
            store.begin_epoch(epoch)
            store.append(make_answer(f"e{epoch}", epoch=epoch))
            store.stats()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "52 more" in caplog.text
    # upkeep goes on beside them
    assert names(store) == ["e7", "e8"] and store._folder.own.path.name == "answers-0008.history"
    assert store.stats().answers == 2 and store.stats().write_errors == 0
    store.close()
    # and nothing of others' is touched
    assert all(path.lstat()[:7] == known[:7] for path, known in before.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_another_users_files_are_read_where_they_may_be_and_left_alone(make_answer):
    # pytest's own folders are closed to others
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        for number in range(3):
            filled(where / f"answers-{number:04d}.history", make_answer(f"{number}"))
        (where / "answers-0001.history").chmod(0o644)
        where.chmod(0o777)
        os.seteuid(65534)
        try:
            store = HistoryStore(HistoryConfig(dir=name))
            store.append(make_answer("a"))
            store.begin_epoch()
            assert names(store) == ["1", "a"] and store.stats().files == 2
            store.close()
        finally:
            os.seteuid(0)
        assert (where / "answers-0003.history").stat().st_uid == 65534
        with sqlite3.connect(where / "answers-0001.history") as known:
            assert known.execute("SELECT request FROM answers").fetchall() == [(b"1",)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_files_in_a_folder_that_may_only_be_read_are_read_and_the_engine_that_would_write_there_is_refused(
    make_answer, tmp_path
):
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        filled(where / "answers-0000.history", make_answer("a")).chmod(0o644)
        where.chmod(0o755)
        os.seteuid(65534)
        try:
            assert [answer.request_id for answer in answers_of(where / "answers-0000.history")] == ["a"]
            with pytest.raises(HistoryError, match="cannot be kept: Permission denied") as caught:
                HistoryStore(HistoryConfig(dir=name))
            assert "permissions" in caught.value.hint
        finally:
            os.seteuid(0)
        assert [path.name for path in where.iterdir()] == ["answers-0000.history"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_folder_whose_file_system_has_no_locks_is_one_clear_error(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(HistoryError, match="has no file locks, which a history needs") as caught:
        HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert "local disk" in caught.value.hint


def test_a_folder_whose_file_system_has_no_shared_memory_is_one_clear_error_and_left_without_answers(
    tmp_path, monkeypatch
):
    # so SQLite answers where it can have no write-ahead log
    plain = Database._one
    monkeypatch.setattr(Database, "_one", lambda self, query: "delete" if "journal" in query else plain(self, query))
    with pytest.raises(HistoryError, match="needs file locks and shared memory, which some file systems lack"):
        HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} <= {"node", "answers-0000.history"}


def test_what_comes_after_the_start_and_cannot_be_used_is_left_out_and_named_once(tmp_path, make_answer, caplog):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=1), vocabulary=OURS)
    for epoch in range(1, 6):
        store.begin_epoch(epoch)
        store.append(make_answer(f"e{epoch}", epoch=epoch))
        if epoch == 1:
            filled(tmp_path / "late.history", vocabulary=THEIRS)
            (tmp_path / "text.history").write_text("ls -l\n")
    assert (store.stats().answers, store.stats().write_errors, store.stats().foreign_files) == (2, 0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "late.history" in caplog.text
    store.close()


def test_a_file_that_the_file_server_no_longer_knows_stops_no_upkeep_and_is_read_again(
    tmp_path, make_answer, monkeypatch
):
    others = [filled(tmp_path / f"answers-000{number}.history", make_answer(f"o{number}", epoch=3)) for number in "12"]
    store, plain = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=1)), os.stat

    def stale(what: object, *args: object, **more: object) -> os.stat_result:
        if what == others[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(what, *args, **more)  # type: ignore[call-overload,no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        store.append(make_answer("new", epoch=3))
        store.begin_epoch(3)
        assert names(store) == ["o2", "new"] and store.stats().write_errors == 0
    store.begin_epoch(4)
    assert names(store) == ["o1", "o2", "new"]


@pytest.mark.parametrize("target", ["answers-0000.history", "nowhere/file", "../outside.history"])
def test_a_link_with_a_files_name_is_passed_over_and_nothing_is_written_where_it_leads(tmp_path, make_answer, target):
    (kept := tmp_path / "kept").mkdir()
    before = filled(tmp_path / "outside.history", make_answer("outside")).read_bytes()
    (kept / "answers-0000.history").symlink_to(target)
    store = HistoryStore(HistoryConfig(dir=str(kept)))
    store.append(make_answer("a"))
    assert "a" in names(store) and store._folder.own.path.name == "answers-0001.history"
    store.close()
    assert (kept / "answers-0000.history").is_symlink() and (tmp_path / "outside.history").read_bytes() == before
    assert not (kept / "nowhere").exists()


def test_small_rows_of_long_answers_are_expanded_one_at_a_time_and_not_before_there_is_room(tmp_path, make_answer):
    # 4 Mi tokens, 16 MiB, in some 16 KB
    whole = bytes([0x80 | 32]) + b"\x80\x80\x80\x02" + zlib.compress(bytes(4 * tokens.MAX_TOKENS), 9)
    database = Database(path := tmp_path / "bomb.history", writes=True)
    row = row_of(make_answer("a"))._replace(tokens=whole, num_tokens=tokens.MAX_TOKENS)
    database.write([row._replace(request=b"%d" % number) for number in range(10)], (), None)
    database.close()
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    try:
        store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20 and store.stats().answers == 10
        # an index that there is no room for costs nothing
        config, builder = HistoryConfig(max_mib=64), Background("build")
        cache = IndexCache(config, store, lambda: HistoryIndex(min_match=1, max_match=7, max_matches=32), builder)
        cache.want("p")
        builder.submit(lambda: None).result(60)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20 and cache.stats().num_bytes <= 64 << 20
        assert cache.stats().shortened == 1
        cache.close()
        store.close()
    finally:
        tracemalloc.stop()


_READ = (
    "count=1",
    "tokens=x'ff00ff'",
    "tokens='text'",
    "tail=(SELECT tokens FROM answers WHERE count=100)",
    "status=-1",
    "status=3",
    "version=x'00'",
    "reward='good'",
    "request=x'ff'",
)
_NOT_EVEN_FOUND = ("count='many'", "tokens=zeroblob(1 << 27)", "tokens=NULL", "problem='p'", "epoch='last'")


@pytest.mark.parametrize("lie", [*_READ, *_NOT_EVEN_FOUND])
def test_a_row_with_columns_that_nobody_of_ours_would_write_is_left_out_alone(tmp_path, make_answer, lie):
    path = filled(tmp_path / "lies.history", *(make_answer(name) for name in "abc"), make_answer("q", "q", count=100))
    change(path, f"UPDATE answers SET {lie} WHERE id=(SELECT id FROM answers ORDER BY id LIMIT 1 OFFSET 1)")
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert names(store) == ["a", "c"] and store.stats().damaged == (lie in _READ)
    assert {store.read(located) and "fine" for located in store.find(None)} <= {None, "fine"}
    store.begin_epoch()
    assert store.stats().write_errors == 0
    assert upkeep.inspect(path).answers == 3 and upkeep.inspect(path).damaged == 1
    store.close()


@pytest.mark.parametrize("seed", range(60))
def test_bytes_that_are_damaged_anywhere_cost_their_file_at_most_and_no_answer_of_it_is_another(
    tmp_path, make_answer, seed
):
    chance = random.Random(seed)
    truth = {f"{number}": make_answer(f"{number}", count=number) for number in range(1, 60)}
    name = chance.choice(["answers-0000.history", "other.history"])
    data = bytearray(filled(tmp_path / name, *truth.values()).read_bytes())
    for _ in range(chance.randrange(1, 4)):
        first = chance.randrange(len(data))
        last = min(len(data), first + chance.choice([1, 30, 3000]))
        how = chance.choice(["zero", "random", "cut", "double"])
        data[first:last] = {
            "zero": bytes(last - first), "random": chance.randbytes(last - first), "cut": b"",
            "double": 2 * data[first:last],
        }[how]  # fmt: skip
    (tmp_path / name).write_bytes(data)
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    for answer in answers_in(store, "p"):
        assert answer.problem_id == "p" and len(answer.token_ids) <= tokens.MAX_TOKENS
    own = make_answer("own", "mine", epoch=store.epoch)
    store.append(own)
    with contextlib.suppress(ValueError):
        store.begin_epoch()
    assert np.array_equal(answers_in(store, "mine")[0].token_ids, own.token_ids)
    store.close()
    again = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert "own" in [answer.request_id for answer in answers_in(again, "mine")]
    again.close()


def test_files_are_their_owners_alone_and_keep_the_mode_that_they_were_given(tmp_path):
    store = HistoryStore(HistoryConfig(dir=str(tmp_path / "kept")))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kept").iterdir()} == {0o600}
    store._folder.own.path.chmod(0o640)
    store.close()
    HistoryStore(HistoryConfig(dir=str(tmp_path / "kept"))).close()
    assert stat.S_IMODE((tmp_path / "kept" / "answers-0000.history").stat().st_mode) == 0o640
