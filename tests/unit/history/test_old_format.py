"""A folder of the formats before databases is read once, whole, and written anew; nothing is lost on the way.

`old_format/` was written by the last version that wrote such files: one of format version 2, one of version 1 with a
damaged record in its middle and a torn one at its end. `expected.json` is what that version read from them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import shutil
import stat
import zlib
from pathlib import Path

import pytest

from tests.unit.history.stored import answers_of
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import old_format, upkeep
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.database import Database, HistoryError
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

KEPT = Path(__file__).with_name("old_format")
OURS = Vocabulary("models/small", 6000, "a1b2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (where := tmp_path / "kept").mkdir()
    for path in KEPT.glob("*.history"):
        shutil.copy(path, where)
    return where


def plain(answer: Answer) -> list[object]:
    known = [answer.problem_id, answer.request_id, answer.epoch, answer.weights_version, answer.status.value]
    tokens = zlib.crc32(answer.token_ids.tobytes())
    return [*known, answer.reward, answer.prompt_tail.tolist(), answer.num_tokens, tokens]


def expected(*names: str) -> list[list[object]]:
    found = json.loads((KEPT / "expected.json").read_text())
    return [answer for name in names for answer in found[name]]


def test_an_engine_finds_all_that_was_readable_and_says_once_that_it_wrote_it_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "answers-0000.history").chmod(0o640)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            store = HistoryStore(HistoryConfig(dir=str(folder), epochs=9), vocabulary=OURS)
            found = [store.read(located) for located in store.find(None)]
            names = ("answers-0000.history", "first.history")
            assert sorted(map(str, map(plain, found))) == sorted(map(str, expected(*names)))  # type: ignore[arg-type]
            # an epoch that began without answers is known as well, and the own file is gone on with
            assert store.epoch == 4 and store._folder.own.path == folder / "answers-0000.history"
            assert store._folder.own.vocabulary == OURS
            store.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "answers-0000.history, first.history" in said[0] and "earlier version" in said[0]
    assert Database(folder / "first.history").vocabulary == ANY_VOCABULARY
    assert stat.S_IMODE((folder / "answers-0000.history").stat().st_mode) == 0o640


def test_one_that_is_still_written_or_in_another_vocabulary_stays_as_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (folder / "first.history").read_bytes()
    with (folder / "first.history").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store = HistoryStore(HistoryConfig(dir=str(folder), epochs=9), vocabulary=Vocabulary("large", 9, "x"))
        assert store.find(None) == [] and "(1 more: first.history)" in caplog.text
        assert "is being written by an engine of an earlier" in str(store._folder._unusable[folder / "first.history"])
        assert store._folder.foreign == [folder / "answers-0000.history"]
    assert (folder / "first.history").read_bytes() == before
    store.begin_epoch(4)
    assert (folder / "first.history").read_bytes() != before and len(store.find(None)) == 3
    store.close()


@pytest.mark.parametrize("seed", range(100))
def test_what_is_damaged_costs_the_answers_that_it_touches(folder: Path, seed: int) -> None:
    chance, path = random.Random(seed), folder / "answers-0000.history"
    data = bytearray(path.read_bytes())
    first = chance.randrange(32, len(data))
    last = min(len(data), first + chance.choice([1, 3, 30, 300]))
    how = chance.choice(["flip", "cut", "zero", "insert"])
    if how == "flip":
        data[first] ^= 1 << chance.randrange(8)
    else:
        new = {"cut": b"", "zero": bytes(last - first), "insert": chance.randbytes(last - first)}[how]
        data[first : first if how == "insert" else last] = new
    path.write_bytes(data)
    old_format.convert(path)
    found, truth = [plain(answer) for answer in answers_of(path)], expected(path.name)
    # a reward's record may be hit instead
    known = {str(one[:5] + one[6:]) for one in truth}
    assert {str(one[:5] + one[6:]) for one in found} <= known and len(found) >= len(truth) - (2 + (last - first) // 40)


@pytest.mark.parametrize("at", [3, 9, 20, 30])
def test_a_file_whose_header_is_damaged_is_left_out_and_left_alone(folder: Path, at: int) -> None:
    path = folder / "answers-0000.history"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    store = HistoryStore(HistoryConfig(dir=str(folder), epochs=9))
    assert len(store.find(None)) == 3 and store._folder.own.path.name == "answers-0001.history"
    store.close()
    assert path.read_bytes() == data


def test_a_conversion_that_fails_leaves_the_old_file_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = folder / "first.history", (folder / "first.history").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        old_format.convert(path)
    assert path.read_bytes() == before
    assert sorted(one.name for one in folder.iterdir()) == ["answers-0000.history", "first.history"]


def test_the_commands_say_what_to_do_with_one(folder: Path, tmp_path: Path) -> None:
    for command in (upkeep.inspect, lambda path: upkeep.merge([path], tmp_path / "new.history")):
        with pytest.raises(HistoryError, match="earlier vllm-specrollout") as caught:
            command(folder / "first.history")
        assert "start an engine" in caught.value.hint
    upkeep.clear(upkeep.find([folder]))
    assert not list(folder.iterdir())
