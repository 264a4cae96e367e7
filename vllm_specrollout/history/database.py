"""A history file: an SQLite database that one engine writes while others read it. No epochs' logic, no folders.

It is in WAL mode with `synchronous=NORMAL`. So what `write` has committed survives the process that wrote it, readers
and the writer never wait for each other, and only `sync` waits for the disk itself. Any thread may call it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_specrollout.config.places import FILE_MODE
from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.history.epochs import MAX_EPOCH
from vllm_specrollout.history.rows import AnswerCounts as AnswerCounts
from vllm_specrollout.history.rows import Reward as Reward
from vllm_specrollout.history.rows import Row as Row
from vllm_specrollout.history.rows import answer_of as answer_of
from vllm_specrollout.history.rows import as_bytes as as_bytes
from vllm_specrollout.history.rows import row_of as row_of
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

SUFFIX = ".history"
VERSION = 4
ERRORS = (sqlite3.Error, OSError)
"""Errors of a disk, or of a file on it, that users of a `Database` meet."""

_APPLICATION = int.from_bytes(b"SRHI", "big")
# small pages: an answer of 1,000 tokens fills none of 4 KiB well
_PAGE = 1024
_COLUMNS = "problem, request, epoch, version, status, reward, count, tail, tokens"
_SCHEMA = (
    "CREATE TABLE about(model TEXT, size INTEGER, digest TEXT, epoch INTEGER, run TEXT, part TEXT)",
    # of a file that others' answers are fetched into: up to which number, by the name of what has them
    "CREATE TABLE fetched(name TEXT PRIMARY KEY, upto INTEGER) WITHOUT ROWID",
    # `stamp` grows with each reward that comes to an answer which is at rest
    "CREATE TABLE answers(id INTEGER PRIMARY KEY, problem BLOB, request BLOB, epoch INTEGER, version INTEGER,"
    " status INTEGER, reward REAL, count INTEGER, tail BLOB, tokens BLOB, stamp INTEGER)",
    "CREATE INDEX by_stamp ON answers(stamp) WHERE stamp IS NOT NULL",
    "CREATE INDEX by_epoch ON answers(epoch)",
    # all that is asked of a problem before its answers are read, and all that is counted
    "CREATE INDEX by_problem ON answers(problem, epoch, count)",
)
_INSERT = f"INSERT OR REPLACE INTO answers(id, {_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# of an answer; what is larger is no answer, and is not read
_MOST_BYTES = 1 << 26
# answers dropped in one go, between which others may write and read
_AT_ONCE = 200
_PAUSE_S = 1e-4
# answers that one question walks over, at most
_SCANNED = 4096


class HistoryError(SpecRolloutError):
    """A history file, or a directory of them, cannot be used."""


class ForeignError(HistoryError):
    """The file's answers are written in another vocabulary."""


class DamagedError(HistoryError):
    """The file is a history, and damaged."""


class OtherFileError(HistoryError):
    """The file is no database at all."""


class OtherRunError(HistoryError):
    """The file is of another training run, whose epochs are not ours."""


class Located(NamedTuple):
    """An answer that can be read, as long as it is kept."""

    # waiting to be written, it is here itself
    source: Database | Row
    number: int
    epoch: int
    num_tokens: int

    @property
    def nearness(self) -> int:
        """As a `Database` has it."""
        return self.source.nearness if isinstance(self.source, Database) else 2


def files(folder: Path) -> list[Path]:
    """The folder's history files, by name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


class Database:
    """One file, open; it closes with its last user.

    Args:
        path: None: in memory.
        writes: whether to make it where it is not there, and write. Only who holds its lock may (see folder.py).
        vocabulary: of the answers to come; a new file names it.
        run: likewise, the training run; empty: not known.
        is_checked: whether it was read whole before, and nothing in it was damaged.

    Raises:
        OtherFileError, ForeignError, OtherRunError, HistoryError: it is no history file, of another vocabulary or run,
            damaged, or of another version.
        FileNotFoundError: there is nothing in it yet.
        OSError: it cannot be opened.
    """

    def __init__(
        self,
        path: Path | None,
        writes: bool = False,
        vocabulary: Vocabulary = ANY_VOCABULARY,
        run: str = "",
        is_checked: bool = False,
    ) -> None:
        self.path = path
        self.failure: Exception | None = None
        """Set by whoever could not read it: it is asked no more."""
        self.nearness = 2
        """Set by whoever knows: 2 of this node, 1 of others, 0 of other runs, which draft where nothing else does."""
        target = ":memory:" if path is None else _openable(path, writes)
        # SQLite refuses to write its log back while the same connection reads
        self._reading = threading.Lock()
        # each statement is a transaction of its own, but where `write` begins one
        self._connection = sqlite3.connect(target, uri=True, isolation_level=None, check_same_thread=False)
        try:
            # the last one to close a file removes its log, which who may only read cannot
            self._connection.execute(f"PRAGMA query_only={not writes:d}")
            self._identity = None if path is None else _identity(path)
            # one that was killed on the way has left a database without anything in it
            if not self._one("SELECT count(*) FROM sqlite_master") and not self._one("PRAGMA user_version"):
                if not writes:
                    raise FileNotFoundError(errno.ENOENT, "no history yet", str(path))
                self._make(vocabulary, run)
            self._expect_history()
            self._read_about()
            if writes and vocabulary not in (ANY_VOCABULARY, self.vocabulary):
                self._expect_fitting(vocabulary)
            self.expect_run(run if writes else "")
            if writes and not is_checked and (damage := self.integrity()) != "ok":
                # what goes into it might not be found again
                raise sqlite3.DatabaseError(damage)
            # a number grows with time, and is given out once, by whichever file of this name
            self._last = self.newest() if writes else 0
            self._stamp = self._one("SELECT max(stamp) FROM answers") or 0 if writes else 0
        except sqlite3.Error as error:
            self.close()
            raise _worded(path, error) from None
        except BaseException:
            self.close()
            raise

    def _make(self, vocabulary: Vocabulary, run: str) -> None:
        ask = self._connection.execute
        ask(f"PRAGMA page_size={_PAGE}")
        ask("PRAGMA auto_vacuum=INCREMENTAL")
        # at the end all of it is waited for
        ask("PRAGMA synchronous=NORMAL")
        if self.path is not None and (mode := str(self._one("PRAGMA journal_mode=WAL"))) != "wal":
            raise sqlite3.OperationalError(f"its journal is {mode!r}, not a write-ahead log")
        with self._transaction():
            for line in _SCHEMA:
                ask(line)
            about = (vocabulary.model, vocabulary.size, vocabulary.digest, 0, run, secrets.token_hex(4))
            ask("INSERT INTO about VALUES(?, ?, ?, ?, ?, ?)", about)
            ask(f"PRAGMA application_id={_APPLICATION}")
            ask(f"PRAGMA user_version={VERSION}")
        self.sync()

    def _expect_history(self) -> None:
        ask = self._connection.execute
        # what another program's database calls when it is read is not run
        ask("PRAGMA trusted_schema=OFF")
        ask("PRAGMA synchronous=NORMAL")
        if self._one("PRAGMA application_id") != _APPLICATION:
            raise OtherFileError(
                f"`{self.path}` is a database of another program, or empty",
                "move it out of the directory, or name another directory in `history.dir`",
            )
        if (version := self._one("PRAGMA user_version")) != VERSION:
            raise HistoryError(
                f"`{self.path}` has format version {version}, and this vllm-specrollout reads version {VERSION}",
                "run the vllm-specrollout that wrote it, or move the file out of the directory",
            )
        found = ask("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if sorted(line for (line,) in found) != sorted(_SCHEMA):
            raise sqlite3.DatabaseError("its tables are not those of a history")

    def _expect_fitting(self, vocabulary: Vocabulary) -> None:
        if self.vocabulary == ANY_VOCABULARY or not vocabulary.fits(self.vocabulary):
            raise ForeignError(
                f"`{self.path}` holds answers in another vocabulary, or does not say in which",
                "name another `history.dir`",
            )

    def expect_run(self, run: str) -> None:
        """Raises: OtherRunError, it is of another run; one that says none is anybody's, and none is any."""
        if run and self.run not in ("", run):
            raise OtherRunError(
                f"`{self.path}` is of the run `{self.run}`, and this is the run `{run}`",
                "name one `history.run` for both to share their epochs, or give each its own `history.dir`",
            )

    def _read_about(self) -> None:
        found: tuple[Any, ...] = self._connection.execute("SELECT * FROM about").fetchone() or (None,) * 6
        model, size, digest, _, run, part = found
        if not (isinstance(size, int) and all(isinstance(one, str) for one in (model, digest, run, part))):
            raise sqlite3.DatabaseError("it does not say whose it is")
        self.vocabulary, self.run, self.part = Vocabulary(model, size, digest), run, part

    # --- reading -----------------------------------------------------------------------------------------------------

    def places(self, problem: bytes | None, oldest: int, most: int) -> list[Located]:
        """The latest answers of a problem (None: of all) since an epoch, older epochs first."""
        which, about = ("by_problem WHERE problem=?", [problem]) if problem is not None else ("by_epoch WHERE true", [])
        found = self._all(
            f"SELECT id, epoch, count FROM answers INDEXED BY {which} AND epoch BETWEEN ? AND {MAX_EPOCH}"
            " AND typeof(count)='integer' ORDER BY epoch DESC, id DESC LIMIT ?",
            (*about, oldest, most),
        )
        return [Located(self, *one) for one in found][::-1]

    def row(self, number: int) -> Row | None:
        size = "length(problem) + length(request) + length(tail) + length(tokens)"
        found = self._all(f"SELECT {_COLUMNS} FROM answers WHERE id=? AND {size} <= {_MOST_BYTES}", (number,))
        return Row(*found[0]) if found else None

    def rows(self) -> Iterator[Row]:
        """All of them, in the order they were written."""
        for found in self._connection.execute(f"SELECT {_COLUMNS} FROM answers ORDER BY id"):
            yield Row(*found)

    def behind(self, number: int, oldest: int, most: int) -> tuple[list[int], int]:
        """Numbers of those behind a number and since an epoch, in the order they were written; and the number up to
        which there are no more. It looks at so many at most, whatever they are."""
        found = list[int]()
        with self._reading, contextlib.closing(self._connection.cursor()) as cursor:
            scanned = cursor.execute("SELECT id, epoch FROM answers WHERE id>? ORDER BY id LIMIT ?", (number, _SCANNED))
            for number, epoch in scanned:
                found += [number] if isinstance(epoch, int) and epoch >= oldest else []
                if len(found) == most:
                    break
        return found, number

    def newest(self) -> int:
        """Number of the answer that was written last; 0: there is none."""
        return self._one("SELECT max(id) FROM answers") or 0

    def earliest_epoch(self) -> int:
        """Of its answers; without any, the highest that there is."""
        return self._one(f"SELECT ifnull(min(epoch), {MAX_EPOCH}) FROM answers")

    def rewards(self, stamp: int, most: int) -> list[tuple[int, Reward]]:
        """(stamp, reward) of those that came behind a stamp to answers that were at rest, oldest first."""
        found = self._all(
            "SELECT stamp, reward, id, request FROM answers INDEXED BY by_stamp"
            " WHERE stamp>? AND typeof(reward)='real' ORDER BY stamp LIMIT ?",
            (stamp, most),
        )
        return [(own, Reward(*one)) for own, *one in found]

    def fetched(self) -> dict[str, int]:
        """Of what was fetched into it: up to which number."""
        return dict(self._all("SELECT name, upto FROM fetched"))

    def changes(self) -> int:
        """Another number whenever some other process, or connection, has written."""
        return self._one("PRAGMA data_version")

    def begun_epoch(self) -> int:
        """The last that was begun, whatever its answers' are."""
        begun = self._one("SELECT epoch FROM about")
        return begun if isinstance(begun, int) and 0 <= begun <= MAX_EPOCH else 0

    def latest_epoch(self) -> int:
        """Of its answers, and the last that was begun; what no index could hold is passed over."""
        newest = self._one(f"SELECT max(epoch) FROM answers WHERE epoch BETWEEN 0 AND {MAX_EPOCH}")
        return max(newest or 0, self.begun_epoch())

    def epochs(self, most: int) -> list[int]:
        """Those that hold answers, so many of the newest."""
        newest = "SELECT max(epoch) AS epoch FROM answers WHERE epoch BETWEEN 0 AND"
        # each from the one before: what is between two of them is not read
        found = self._all(
            f"WITH RECURSIVE found(epoch) AS ({newest} {MAX_EPOCH} UNION ALL SELECT ({newest} found.epoch - 1)"
            " FROM found WHERE epoch IS NOT NULL) SELECT epoch FROM found WHERE epoch IS NOT NULL LIMIT ?",
            (most,),
        )
        return [epoch for (epoch,) in found]

    def counts(self, oldest: int) -> AnswerCounts:
        """Of the answers since an epoch."""
        found = self._all(
            "SELECT count(*), total(count), count(DISTINCT problem) FROM answers INDEXED BY by_problem"
            f" WHERE epoch BETWEEN ? AND {MAX_EPOCH}",
            (oldest,),
        )
        return AnswerCounts(*map(int, found[0]))

    def integrity(self) -> str:
        """`ok`, or what is damaged. Reads all of it."""
        try:
            return str(self._one("PRAGMA quick_check(1)"))
        except sqlite3.Error as error:
            return str(error)

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file; not if nobody can say."""
        with contextlib.suppress(OSError):
            return self.path is None or _identity(self.path) == self._identity
        return False

    def used_bytes(self) -> int:
        """Without the pages that are free to be written again."""
        return (self._one("PRAGMA page_count") - self._one("PRAGMA freelist_count")) * self._one("PRAGMA page_size")

    def _one(self, query: str) -> int:
        """The first value of the first row; which type it has, the query says."""
        found = self._all(query)
        return found[0][0] if found else None  # type: ignore[return-value]

    def _all(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._reading:
            return self._connection.execute(query, values).fetchall()

    # --- writing -----------------------------------------------------------------------------------------------------

    def bound_log(self, num_bytes: int) -> None:
        """Have the write-ahead log begin anew behind so many bytes, or a few more."""
        self._connection.execute(f"PRAGMA wal_autocheckpoint={max(32, num_bytes // _PAGE)}")
        self._connection.execute(f"PRAGMA journal_size_limit={max(32 * _PAGE, num_bytes)}")

    def write(self, rows: Sequence[Row], rewards: Sequence[Reward], epoch: int | None) -> list[int]:
        """Write all of it or nothing; returns the answers' numbers.

        Args:
            rewards: of answers that are there.
            epoch: the one that has begun; answers of later ones are of this one from now on.
        """
        first = max(self._last + 1, time.time_ns() // 1000)
        numbers = list(range(first, first + len(rows)))
        self.put(list(zip(numbers, rows, strict=True)), rewards, epoch)
        return numbers

    def put(
        self,
        rows: Sequence[tuple[int, Row]],
        rewards: Sequence[Reward],
        epoch: int | None,
        fetched: dict[str, int] | None = None,
    ) -> None:
        """As `write`, under numbers that are given; what has such a number already is replaced."""
        stamps = itertools.count(self._stamp + 1)
        with self._transaction():
            self._connection.executemany(_INSERT, [(number, *row) for number, row in rows])
            # a number may be another answer's by now
            stamped = [(one.reward, next(stamps), one.number, one.request) for one in rewards]
            self._connection.executemany("UPDATE answers SET reward=?, stamp=? WHERE id=? AND request=?", stamped)
            if epoch is not None:
                self._connection.execute("UPDATE about SET epoch=?", (epoch,))
                # a call that went far ahead was taken back
                self._connection.execute("UPDATE answers SET epoch=? WHERE epoch>?", (epoch, epoch))
            self._connection.executemany("INSERT OR REPLACE INTO fetched VALUES(?, ?)", (fetched or {}).items())
        self._last = max([self._last, *(number for number, _ in rows)])
        self._stamp += len(rewards)

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        self._all("PRAGMA wal_checkpoint(PASSIVE)")

    def clear(self) -> None:
        """Drop all that it has, and what it was fetched from."""
        self.drop_oldest(1 << 62)
        self._all("DELETE FROM fetched")

    def drop_before(self, epoch: int) -> set[int]:
        """Drop the answers of earlier epochs; returns their numbers."""
        return self._drop("WHERE epoch<?", epoch, 1 << 62)

    def drop_oldest(self, count: int) -> set[int]:
        """Drop so many, those of the oldest epochs first, and of one epoch those that were written first."""
        return self._drop("WHERE epoch<=? ORDER BY epoch, id", 1 << 62, count)

    def _drop(self, which: str, epoch: int, count: int) -> set[int]:
        dropped = set[int]()
        while len(dropped) < count:
            few = min(_AT_ONCE, count - len(dropped))
            found = self._all(f"SELECT id FROM answers {which} LIMIT {few}", (epoch,))
            if not found:
                break
            with self._transaction():
                self._connection.executemany("DELETE FROM answers WHERE id=?", found)
            dropped |= {number for (number,) in found}
            time.sleep(_PAUSE_S)
        return dropped

    def give_back(self) -> None:
        """Give the disk what is free, if that is more than half."""
        while 2 * self._one("PRAGMA freelist_count") > self._one("PRAGMA page_count"):
            self._all("PRAGMA incremental_vacuum(256)")

    def compact(self) -> None:
        """Give the disk all that is free; takes as long as writing it anew."""
        self._all("VACUUM")
        self.sync()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._connection.close()


def beside(path: Path) -> tuple[Path, Path]:
    """SQLite's own files beside a database: its log, and memory that processes share."""
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")


def size_of(path: Path) -> int:
    """On disk, the log included."""
    log, _ = beside(path)
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def remove(path: Path) -> None:
    """Remove a file and what is beside it. Who reads it can go on."""
    for name in (path, *beside(path)):
        name.unlink(missing_ok=True)


def _openable(path: Path, writes: bool) -> str:
    """The file's address for SQLite, which would wait for a pipe's other end, and follow a link."""
    if writes and not os.path.lexists(path):
        # its owner's alone; SQLite gives what it keeps beside the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    if not stat.S_ISREG((path.lstat() if writes else path.stat()).st_mode):
        raise HistoryError(f"`{path}` is no regular file", "move it out of the directory")
    if not os.access(path, os.R_OK | (os.W_OK if writes else 0), effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    mode, log = "rw", beside(path)[0]
    if not all(os.access(one, os.W_OK, effective_ids=True) for one in (path, path.parent)):
        # nobody writes it, if there is no log, and nothing may be put beside it
        mode = "ro" if log.exists() or os.access(path.parent, os.W_OK, effective_ids=True) else "ro&immutable=1"
    return f"{path.absolute().as_uri()}?mode={mode}"


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _worded(path: Path | None, error: sqlite3.Error) -> HistoryError:
    code = getattr(error, "sqlite_errorname", "SQLITE_PROTOCOL")
    if code == "SQLITE_NOTADB":
        cause = f"`{path}` does not start like a history file (format version {VERSION})"
        return OtherFileError(cause, "move it out of the directory, or name another directory in `history.dir`")
    if not isinstance(error, sqlite3.OperationalError):
        return DamagedError(
            f"`{path}` is damaged: {error}",
            "move the file out of the directory: only the answers in it are lost, and drafts for them",
        )
    needs = code.startswith(("SQLITE_IOERR", "SQLITE_PROTOCOL", "SQLITE_CANTOPEN", "SQLITE_NOLFS"))
    more = "; it needs file locks and shared memory, which some file systems lack" if needs else ""
    return HistoryError(
        f"the history in `{path}` cannot be kept: {error}{more}",
        "name a folder on a local disk in `history.dir`, or see to its permissions",
    )
