"""The archive of many nodes' answers: what it keeps, what it gives, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")

from tests.unit.history.archived import KIND, ROOM, RUN, all_of, answer
from vllm_specrollout.cluster.messages import MessageError, encode
from vllm_specrollout.history.archive import Archive, Bring, Has, Page, Refused, Want, portion, read
from vllm_specrollout.history.database import Database, Reward, row_of
from vllm_specrollout.history.mirrors import Mirrors, kind_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.types import Answer, FinishReason


def test_a_thousand_names_take_no_more_descriptors_than_there_are(tmp_path: Path) -> None:
    """In a process of its own, which has 256 of them; in memory, where the host lets it."""
    memory = Path("/dev/shm")
    code = """
import os, resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from pathlib import Path
from tests.unit.history.archived import KIND, ROOM, answer
from vllm_specrollout.history.archive import Archive, Bring, Has, Want
from vllm_specrollout.history.database import row_of
row = row_of(answer("x"))
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    for life, count in enumerate((1000, 50)):
        archive = Archive(Path(folder) / "kept", f"ipc://{folder}/s", ROOM)
        assert len(archive.mirrors.known) == 1000 * life
        for name in range(count):
            note = archive.answer(Bring(1, f"{name:016x}.answers-0000", KIND, 0, ((1 + life, row),), ()))
            assert isinstance(note, Has), note
        have = dict.fromkeys(list(archive.mirrors.known)[1:], 2)
        assert len(archive.answer(Want(1, "f" * 16, KIND, 0, have, "", 0)).rows) == 1 + life
        assert len(os.listdir("/proc/self/fd")) < 200
        archive.close()
"""
    where = str(memory if os.access(memory, os.W_OK) else tmp_path)
    done = subprocess.run([sys.executable, "-c", code, where], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_mirrors_go_when_nobody_has_spoken_of_them_for_a_day_and_runs_for_a_week(tmp_path: Path) -> None:
    now = [0.0]
    mirrors, row = Mirrors(tmp_path, ROOM, clock=lambda: now[0]), row_of(answer("x"))
    dead, alive, other = (f"{number:016x}.answers-0000" for number in range(3))
    runs = {dead: "one", alive: "one", other: "two"}
    for name, run in runs.items():
        mirrors.put(name, kind_of(ANY_VOCABULARY, run), [(1, row)], (), 0)
    for days, left in ((0.9, {dead, alive, other}), (1.1, {alive, other}), (7.1, {alive}), (15.0, set())):
        now[0] = days * 86400.0
        if days < 8:
            mirrors.put(alive, kind_of(ANY_VOCABULARY, "one"), (), (), 0)
        mirrors.trim()
        assert set(mirrors.known) == left == {path.stem for path in tmp_path.glob("*.history")}
    mirrors.close()


def test_an_archive_without_room_takes_the_oldest_epochs_of_the_run_that_has_most(tmp_path: Path) -> None:
    mirrors, rng = Mirrors(tmp_path, 1 << 18), np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 30, 4000).astype(np.int32)
    for epoch in range(20):
        row = row_of(Answer(f"{epoch}", "p", tokens[:2], tokens, FinishReason.FINISHED, 0, epoch=epoch))
        mirrors.put(f"{0:016x}.answers-0000", kind_of(ANY_VOCABULARY, "large"), [(epoch + 1, row)], (), 300 + epoch)
        if epoch < 3:
            mirrors.put(f"{1:016x}.answers-0000", kind_of(ANY_VOCABULARY, "small"), [(epoch + 1, row)], (), epoch)
        mirrors.trim()
    kept = {name: [row.epoch for row in mirror.rows()] for name, mirror in all_of(mirrors).items()}
    assert kept[f"{1:016x}.answers-0000"] == [0, 1, 2]
    assert 3 < len(kept[f"{0:016x}.answers-0000"]) < 20 and kept[f"{0:016x}.answers-0000"][-1] == 19
    mirrors.close()


def test_a_file_whose_epoch_has_jumped_keeps_its_last_epochs_with_answers(tmp_path: Path) -> None:
    archive, name = Archive(tmp_path, f"ipc://{tmp_path}/s", ROOM), f"{7:016x}.answers-0000"
    rows = tuple((1 + epoch, row_of(answer(f"{epoch}", epoch=epoch))) for epoch in range(4))
    for epoch in (3, 1_000_000, 2_000_000):
        archive.answer(Bring(1, name, RUN, epoch, rows if epoch == 3 else (), (), 2))
    page = archive.answer(Want(1, "0" * 16, RUN, 2, {}, "", 0))
    assert isinstance(page, Page) and [row.epoch for _, row in page.rows] == [2, 3]
    archive.close()


def test_a_question_costs_what_is_new_however_many_old_rows_there_are(tmp_path: Path) -> None:
    archive = Archive(tmp_path, f"ipc://{tmp_path}/s", ROOM)
    name, row = f"{7:016x}.answers-0000", row_of(answer("x"))
    for first in range(1, 9000, 256):
        rows = tuple((number, row) for number in range(first, first + 256))
        archive.answer(Bring(1, name, KIND, 9, rows, ()))
    # two epochs since that hold answers
    archive.answer(Bring(1, name, KIND, 9, tuple((n, row._replace(epoch=6 + n)) for n in (1, 2)), ()))
    have, asked = {name: 2}, 0
    while (page := archive.answer(Want(1, "0" * 16, KIND, 2, have, "", 0))).name:  # type: ignore[union-attr]
        assert isinstance(page, Page) and not page.rows and page.upto > have[name]
        have, asked = {name: page.upto}, asked + 1
    assert asked <= 3 and have[name] == archive.mirrors.known[name].upto, "it is not asked for again"
    archive.close()


def test_the_archive_keeps_within_its_room_and_the_oldest_epochs_go(tmp_path: Path) -> None:
    mirrors = Mirrors(tmp_path, 1 << 18)
    rng = np.random.default_rng(0)
    for epoch in range(6):
        tokens = rng.integers(0, 1 << 30, 40_000).astype(np.int32)
        row = row_of(Answer(f"{epoch}", "p", tokens[:2], tokens, FinishReason.FINISHED, 0, epoch=epoch))
        mirrors.put(f"{epoch % 2:016x}.answers-0000", KIND, [(epoch + 1, row)], (), epoch)
        mirrors.trim()
        assert sum(one.used_bytes() for one in all_of(mirrors).values()) <= 1 << 18
    left = sorted(row.epoch for one in all_of(mirrors).values() for row in one.rows())
    assert left and left == list(range(6 - len(left), 6)) and len(left) < 6
    assert {name: known.upto for name, known in mirrors.known.items()} == {
        f"{0:016x}.answers-0000": 5,
        f"{1:016x}.answers-0000": 6,
    }, "what went is not asked for again"
    mirrors.close()


def test_rows_and_rewards_brought_twice_are_kept_once(tmp_path: Path) -> None:
    archive = Archive(tmp_path, f"ipc://{tmp_path}/s", ROOM)
    name, row = f"{7:016x}.answers-0000", row_of(answer("x"))
    for turn in range(2):
        found = archive.answer(Bring(turn, name, KIND, 1, ((5, row),), (Reward(1.0, 5, b"x"),)))
        assert isinstance(found, Has) and (found.turn, found.upto) == (turn, 5)
    page = archive.answer(Want(3, "0" * 16, KIND, 1, {}, found.life, 1))
    assert isinstance(page, Page) and page.rows == ((5, row._replace(reward=1.0)),)
    assert (page.seen, page.rewards) == (2, ((name, Reward(1.0, 5, b"x")),)), "the one that it had not seen"
    archive.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(Has(1, 2, "z" * 16)),
        encode(Bring(0, "../../x", KIND, 0, (), ())),
        encode(Bring(0, f"{7:016x}.answers-0000\n", KIND, 0, (), ())),
    ],
)
def test_bytes_that_are_no_message_are_an_error_and_no_more(data: bytes) -> None:
    with pytest.raises(MessageError, match="are no message"):
        read(data)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_number_that_no_database_holds_is_refused_and_the_archive_goes_on(tmp_path: Path, number: int) -> None:
    archive = Archive(tmp_path, f"ipc://{tmp_path}/s", ROOM)
    name, row = f"{7:016x}.answers-0000", row_of(answer("x"))
    found = archive.answer(Bring(0, name, KIND, 1, ((5, row._replace(version=number)),), ()))
    assert isinstance(found, Refused) and "OverflowError" in found.reason
    assert archive.answer(Bring(1, name, KIND, 1, ((5, row),), ())).turn == 1
    assert [one.request for mirror in all_of(archive.mirrors).values() for one in mirror.rows()] == [b"x"]
    archive.close()


def test_what_an_archive_cannot_keep_it_refuses_with_the_reason(tmp_path: Path) -> None:
    archive = Archive(tmp_path, f"ipc://{tmp_path}/s", ROOM)
    name = f"{7:016x}.answers-0000"
    archive.answer(Bring(0, name, kind_of(Vocabulary("A", 100, "a")), 0, (), ()))
    found = archive.answer(Bring(1, name, kind_of(Vocabulary("B", 100, "b")), 0, (), ()))
    assert isinstance(found, Refused) and "another vocabulary" in found.reason
    assert isinstance(archive.answer(Has(2, 0, "0" * 16)), Refused)
    archive.close()


def test_a_portion_ends_where_a_message_would_be_full(tmp_path: Path) -> None:
    source, rng = Database(tmp_path / "a.history", True), np.random.default_rng(0)
    drawn = [rng.integers(0, 1 << 30, 200_000).astype(np.int32) for _ in range(5)]
    rows = [row_of(Answer("x", "p", tokens[:1], tokens, FinishReason.FINISHED, 0)) for tokens in drawn]
    numbers = source.write(rows, (), None)
    seen, behind = list[int](), 0
    while True:
        few, upto = portion(source, behind)
        if upto == behind:
            break
        assert len(encode(Bring(0, f"{7:016x}.answers-0000", KIND, 0, few, ()))) < 4 << 20
        seen, behind = [*seen, *(number for number, _ in few)], upto
    assert seen == numbers
