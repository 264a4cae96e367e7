"""Whatever lies in the directory, an engine starts, says once what it leaves out, and keeps its own answers."""

from __future__ import annotations

import errno
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.history.poisoned import OURS, THEIRS, poison
from tests.unit.history.stored import answers_in
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import folder, frames
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.log import ForeignError, Reader, Writer
from vllm_specrollout.history.records import AnswerHead
from vllm_specrollout.history.store import HistoryStore

MakeAnswer = Callable[..., Answer]


def test_a_poisoned_directory_is_served_from_and_named_once(
    tmp_path: Path, make_answer: MakeAnswer, caplog: pytest.LogCaptureFixture
) -> None:
    assert poison(tmp_path, make_answer("good")) == 43
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    with caplog.at_level(logging.WARNING):
        store = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=1), vocabulary=OURS)
        for epoch in range(1, 9):
            store.begin_epoch(epoch)
            store.append(make_answer(f"e{epoch}", epoch=epoch))
            store.stats()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "42 more" in caplog.text
    # upkeep goes on beside them
    assert [answer.request_id for answer in answers_in(store, "p")] == ["e7", "e8"]
    assert store.stats().answers == 2 and store.stats().write_errors == 0
    store.close()
    # and nothing of others' is touched
    assert all(path.lstat()[:7] == stat[:7] for path, stat in before.items())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_another_users_files_are_left_alone(make_answer: MakeAnswer) -> None:
    # pytest's own folders are closed to others
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        for number in range(3):
            Writer(where / f"answers-{number:04d}.history").close()
        (where / "answers-0001.history").chmod(0o644)
        where.chmod(0o777)
        os.seteuid(65534)
        try:
            store = HistoryStore(HistoryConfig(dir=name))
            store.append(make_answer("a"))
            store.begin_epoch()
            assert [answer.request_id for answer in answers_in(store, "p")] == ["a"]
            # it could be read, and is not written
            assert store.stats().files == 2
            store.close()
        finally:
            os.seteuid(0)
        assert (where / "answers-0003.history").stat().st_uid == 65534


@pytest.mark.parametrize("name", ["answers-0000.history", "other.history"])
def test_a_file_of_another_vocabulary_is_an_error_at_the_start_where_that_is_asked_for(
    tmp_path: Path, name: str
) -> None:
    Writer(tmp_path / name, vocabulary=THEIRS).close()
    with pytest.raises(ForeignError, match="vocabulary"):
        HistoryStore(HistoryConfig(dir=str(tmp_path), foreign="refuse"), vocabulary=OURS)
    HistoryStore(HistoryConfig(dir=str(tmp_path)), vocabulary=OURS).close()


def test_files_that_claim_to_have_lost_millions_of_records_cost_no_memory(
    tmp_path: Path, make_answer: MakeAnswer
) -> None:
    path = tmp_path / "jump.history"
    writer = Writer(path)
    writer.append(make_answer("a"))
    seed, payload = writer.reader.scanner().seed, writer.reader.payload(frames.HEADER.size)
    writer.close()
    with path.open("ab") as file:
        for jump in range(1, 5):
            file.write(frames.new_frame(seed, jump << 26, payload))
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert [answer.request_id for answer in answers_in(store, "p")] == ["a"]
    scanner = next(reader for reader in store._kept.folder.readers() if reader.path == path).scanner()
    assert scanner.next_sequence < 1 << 17


def test_a_file_full_of_markers_is_read_once(tmp_path: Path, make_answer: MakeAnswer, monkeypatch) -> None:
    path = tmp_path / "markers.history"
    writer = Writer(path)
    writer.append(make_answer("a"))
    writer.close()
    with path.open("ab") as file:
        file.write(frames.MARKER * 600_000)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(len(data := pread(*args))) or data)
    HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert sum(read) < 4 * path.stat().st_size


def test_a_foreign_file_that_comes_after_the_start_is_left_out_and_upkeep_goes_on(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    store = HistoryStore(HistoryConfig(dir=str(tmp_path), foreign="refuse", epochs=1), vocabulary=OURS)
    for epoch in range(1, 6):
        store.begin_epoch(epoch)
        store.append(make_answer(f"e{epoch}", epoch=epoch))
        if epoch == 1:
            Writer(tmp_path / "late.history", vocabulary=THEIRS).close()
    stats = store.stats()
    assert (stats.answers, stats.write_errors, stats.foreign_files) == (2, 0, 1)
    # what is old has left the file too
    held = [head for _, head in Reader(store._kept.folder.path).records() if isinstance(head, AnswerHead)]
    assert not {head.epoch for head in held} & {1, 2}
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "late.history" in caplog.text
    store.close()


@pytest.mark.parametrize("call", ["fstat", "stat"])
def test_a_file_that_the_file_server_no_longer_knows_stops_no_upkeep(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(folder, "_LEAST_REWRITTEN", 0)
    others = [Writer(tmp_path / f"answers-{number:04d}.history") for number in range(1, 3)]
    for number, other in enumerate(others):
        other.append(make_answer(f"other-{number}", epoch=1))
    store = HistoryStore(HistoryConfig(dir=str(tmp_path), epochs=1))
    store.append(make_answer("old", count=100))
    store.begin_epoch(1)
    gone = next(reader for reader in store._kept.folder.readers() if reader.path == others[0].path)
    plain = getattr(os, call)

    def stale(what: object, *args: object, **more: object) -> os.stat_result:
        if what in (gone.descriptor.fd, gone.path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(what, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, stale)
        assert store.stats().files == 3
        store.append(make_answer("new", epoch=3))
        store.begin_epoch(3)
        assert store.stats().write_errors == 0
    # the old answer has left memory and the file, and the files of others are read again
    held = [head for _, head in Reader(store._kept.folder.path).records() if isinstance(head, AnswerHead)]
    assert [head.request_id for head in held] == ["new"]
    store.begin_epoch(4)
    assert store.stats().files == 3


@pytest.mark.parametrize("target", ["answers-0000.history", "nowhere/file", "../outside.history"])
def test_a_link_with_a_files_name_is_passed_over_and_nothing_is_written_where_it_leads(
    tmp_path: Path, make_answer: MakeAnswer, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    outside = Writer(tmp_path / "outside.history")
    outside.close()
    before = outside.path.read_bytes()
    (kept / "answers-0000.history").symlink_to(target)
    store = HistoryStore(HistoryConfig(dir=str(kept)))
    store.append(make_answer("a"))
    assert [answer.request_id for answer in answers_in(store, "p")] == ["a"]
    assert store._kept.folder.path.name == "answers-0001.history"
    store.close()
    assert (kept / "answers-0000.history").is_symlink() and outside.path.read_bytes() == before
    assert not (kept / "nowhere").exists()


@pytest.mark.parametrize("kind", ["socket", "device that is gone", "stale"])
def test_an_entry_that_cannot_be_opened_is_no_reason_to_refuse_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "answers-0000.history"
    path.touch()
    code = {"socket": errno.ENXIO, "device that is gone": errno.ENODEV, "stale": errno.ESTALE}[kind]
    plain = os.open

    def fail(what: object, *args: int, **more: object) -> int:
        if what == path:
            raise OSError(code, os.strerror(code))
        return plain(what, *args, **more)

    monkeypatch.setattr(os, "open", fail)
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert store._kept.folder.path.name == "answers-0001.history"
    store.close()


@pytest.mark.parametrize("claims", ["to the end", "beyond the end"])
def test_frames_that_claim_the_rest_of_the_file_are_not_read_again_and_again(
    tmp_path: Path, make_answer: MakeAnswer, monkeypatch: pytest.MonkeyPatch, claims: str
) -> None:
    path = tmp_path / "claims.history"
    writer = Writer(path)
    writer.append(make_answer("a"))
    writer.close()
    seed, size = writer.reader.scanner().seed, frames.FRAME.size
    rest = 4000 * size
    with path.open("ab") as file:
        for at in range(0, rest, size):
            length = rest - at - size + (claims == "beyond the end")
            start = frames.FRAME.pack(frames.MARKER, length, 1 + at // size, 0, 0)[:12]
            file.write(start + struct.pack("<II", zlib.crc32(start, seed), 0))
    taken, take = [], frames.Window.take
    monkeypatch.setattr(frames.Window, "take", lambda *args: taken.append(len(data := take(*args))) or data)
    assert [head.request_id for _, head in Reader(path).records()] == ["a"]
    assert sum(taken) < 8 * path.stat().st_size


def test_records_behind_a_damaged_one_are_found_however_much_was_damaged_before(
    tmp_path: Path, make_answer: MakeAnswer
) -> None:
    path = tmp_path / "damaged.history"
    writer = Writer(path)
    places = [writer.append(make_answer(f"{number:03d}")) for number in range(200)]
    writer.close()
    data = bytearray(path.read_bytes())
    for place in places[::2]:
        data[place.offset + frames.FRAME.size + 5] ^= 1
    path.write_bytes(data)
    found = [head.request_id for _, head in Reader(path).records()]
    assert found == [f"{number:03d}" for number in range(1, 200, 2)]
