"""Whatever lies in the directory, an engine starts, says once what it leaves out, and keeps its own answers."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.history.poisoned import OURS, THEIRS, poison
from tests.unit.history.stored import answers_in
from vllm_specrollout.drafter_config import HistoryConfig
from vllm_specrollout.history import frames
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.log import ForeignError, Writer
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
        folder = Path(name)
        for number in range(3):
            Writer(folder / f"answers-{number:04d}.history").close()
        (folder / "answers-0001.history").chmod(0o644)
        folder.chmod(0o777)
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
        assert (folder / "answers-0003.history").stat().st_uid == 65534


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
