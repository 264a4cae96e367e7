"""The archive of many nodes' answers: what it keeps, what it gives, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.history.archived import KIND, ROOM, RUN, all_of, answer, file_of, noise, requests_in
from vllm_specrollout.cluster.messages import MessageError, encode
from vllm_specrollout.history.archive import Archive, Bring, Has, Page, Refused, Want, portion, read
from vllm_specrollout.history.database import Database, Reward, row_of
from vllm_specrollout.history.mirrors import Mirrors, kind_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

NAME, ROW = file_of(7), row_of(answer("x"))


@pytest.fixture
def archive(tmp_path):
    one = Archive(tmp_path / "kept", f"ipc://{tmp_path}/s", ROOM)
    yield one
    one.close()


def test_a_thousand_names_take_no_more_descriptors_than_there_are(tmp_path):
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


def test_mirrors_go_when_nobody_has_spoken_of_them_for_a_day_and_runs_for_a_week(tmp_path):
    now = [0.0]
    mirrors, row = Mirrors(tmp_path, ROOM, clock=lambda: now[0]), row_of(answer("x"))
    dead, alive, other = map(file_of, range(3))
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


def test_an_archive_without_room_takes_the_oldest_epochs_of_the_run_that_has_most_whosever_they_are(tmp_path):
    mirrors, tokens, small = Mirrors(tmp_path, 1 << 18), noise(4000), file_of(2)
    for epoch in range(20):
        rows = [(epoch + 1, row_of(answer(f"{epoch}", epoch=epoch, tokens=tokens)))]
        mirrors.put(file_of(epoch % 2), kind_of(ANY_VOCABULARY, "large"), rows, (), 300 + epoch)
        if epoch < 3:
            mirrors.put(small, kind_of(ANY_VOCABULARY, "small"), rows, (), epoch)
        mirrors.trim()
        assert sum(one.used_bytes() for one in all_of(mirrors).values()) <= 1 << 18
    kept = {name: [row.epoch for row in mirror.rows()] for name, mirror in all_of(mirrors).items()}
    assert kept.pop(small) == [0, 1, 2]
    left = sorted(sum(kept.values(), []))
    assert 3 < len(left) < 20 and left == list(range(20 - len(left), 20))
    upto = {name: known.upto for name, known in mirrors.known.items()}
    assert upto == {small: 3, file_of(0): 19, file_of(1): 20}, "what went is not asked for again"
    mirrors.close()


def test_a_file_whose_epoch_has_jumped_keeps_its_last_epochs_with_answers(archive):
    rows = tuple((1 + epoch, row_of(answer(f"{epoch}", epoch=epoch))) for epoch in range(4))
    for epoch in (3, 1_000_000, 2_000_000):
        archive.answer(Bring(1, NAME, RUN, epoch, rows if epoch == 3 else (), (), 2))
    page = archive.answer(Want(1, "0" * 16, RUN, 2, {}, "", 0))
    assert isinstance(page, Page) and [row.epoch for _, row in page.rows] == [2, 3]


def test_a_question_costs_what_is_new_however_many_old_rows_there_are(archive):
    for first in range(1, 9000, 256):
        rows = tuple((number, ROW) for number in range(first, first + 256))
        archive.answer(Bring(1, NAME, KIND, 9, rows, ()))
    # two epochs since that hold answers
    archive.answer(Bring(1, NAME, KIND, 9, tuple((n, ROW._replace(epoch=6 + n)) for n in (1, 2)), ()))
    have, asked = {NAME: 2}, 0
    while (page := archive.answer(Want(1, "0" * 16, KIND, 2, have, "", 0))).name:
        assert isinstance(page, Page) and not page.rows and page.upto > have[NAME]
        have, asked = {NAME: page.upto}, asked + 1
    assert asked <= 3 and have[NAME] == archive.mirrors.known[NAME].upto, "it is not asked for again"


def test_rows_and_rewards_brought_twice_are_kept_once(archive):
    for turn in range(2):
        found = archive.answer(Bring(turn, NAME, KIND, 1, ((5, ROW),), (Reward(1.0, 5, b"x"),)))
        assert isinstance(found, Has) and (found.turn, found.upto) == (turn, 5)
    page = archive.answer(Want(3, "0" * 16, KIND, 1, {}, found.life, 1))
    assert isinstance(page, Page) and page.rows == ((5, ROW._replace(reward=1.0)),)
    assert (page.seen, page.rewards) == (2, ((NAME, Reward(1.0, 5, b"x")),)), "the one that it had not seen"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(Has(1, 2, "z" * 16)),
        encode(Bring(0, "../../x", KIND, 0, (), ())),
        encode(Bring(0, NAME + "\n", KIND, 0, (), ())),
    ],
)
def test_bytes_that_are_no_message_are_an_error_and_no_more(data):
    with pytest.raises(MessageError, match="are no message"):
        read(data)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_a_number_that_no_database_holds_is_refused_and_the_archive_goes_on(archive, number):
    found = archive.answer(Bring(0, NAME, KIND, 1, ((5, ROW._replace(version=number)),), ()))
    assert isinstance(found, Refused) and "OverflowError" in found.reason
    assert archive.answer(Bring(1, NAME, KIND, 1, ((5, ROW),), ())).turn == 1
    assert requests_in(archive.mirrors) == [b"x"]


def test_what_an_archive_cannot_keep_it_refuses_with_the_reason(archive):
    archive.answer(Bring(0, NAME, kind_of(Vocabulary("A", 100, "a")), 0, (), ()))
    found = archive.answer(Bring(1, NAME, kind_of(Vocabulary("B", 100, "b")), 0, (), ()))
    assert isinstance(found, Refused) and "another vocabulary" in found.reason
    assert isinstance(archive.answer(Has(2, 0, "0" * 16)), Refused)


def test_a_portion_ends_where_a_message_would_be_full(tmp_path):
    source = Database(tmp_path / "a.history", True)
    numbers = source.write([row_of(answer("x", tokens=noise(200_000, seed))) for seed in range(5)], (), None)
    seen, behind = list[int](), 0
    while True:
        few, upto = portion(source, behind)
        if upto == behind:
            break
        assert len(encode(Bring(0, NAME, KIND, 0, few, ()))) < 4 << 20
        seen, behind = [*seen, *(number for number, _ in few)], upto
    assert seen == numbers
