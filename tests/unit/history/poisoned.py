"""A directory of histories as nobody wants it."""

import os
import sqlite3
from pathlib import Path

from vllm_specrollout.history.database import Database, row_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.types import Answer

OURS, THEIRS = Vocabulary("ours", 6000, "a1"), Vocabulary("theirs", 150_000, "b2")


def filled(path: Path, *answers: Answer, vocabulary: Vocabulary = ANY_VOCABULARY, epoch: int | None = None) -> Path:
    """A file of these answers, that nobody has open."""
    database = Database(path, True, vocabulary)
    database.write([row_of(answer) for answer in answers], (), epoch)
    database.close()
    return path


def change(path: Path, *lines: str) -> None:
    """Run these lines of SQL on a file, as another program would."""
    with sqlite3.connect(path) as connection:
        for line in lines:
            connection.execute(line)
    connection.close()


def poison(folder: Path, good_answer: Answer) -> int:
    """Damaged and odd entries of every kind; returns how many there are beside the one good file, of `OURS`."""
    for number in range(5):
        os.mkfifo(folder / f"pipe-{number}.history")
        (folder / f"folder-{number}.history").mkdir()
        (folder / f"link-{number}.history").symlink_to(f"link-{number}.history")
        (folder / f"text-{number}.history").write_text("ls -l\n")
        (folder / f"answers-{number:04d}.history").write_bytes(bytes(4096))
        change(filled(folder / f"later-{number}.history"), "PRAGMA user_version=77")
        change(folder / f"other-{number}.history", "CREATE TABLE commands(line TEXT)")
        change(filled(folder / f"changed-{number}.history"), "DROP INDEX by_epoch")
        filled(folder / f"foreign-{number}.history", vocabulary=THEIRS)
        damaged = filled(folder / f"damaged-{number}.history", vocabulary=OURS)
        data = damaged.read_bytes()
        damaged.write_bytes(data[:1024] + os.urandom(len(data) - 1024))
    os.mkfifo(folder / "answers-0005.history")
    (folder / "answers-0006.history").mkdir()
    filled(folder / "answers-0007.history", vocabulary=THEIRS)
    filled(folder / "good.history", good_answer, vocabulary=OURS)
    return len(list(folder.iterdir())) - 1
