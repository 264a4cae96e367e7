"""The directory of a store: the file that this engine writes, and those of others, which it reads. No epochs' logic.

Each engine claims the first file of its training run that nobody writes: it holds a lock (`flock`) on a file beside it.
Not on the file itself: who closes any descriptor of a database drops the locks that SQLite has on it.

Epochs are numbers of one run. What others have answered lies in two files of the courier (courier.py): in
epochs as they are counted here, and without a say in when ours begin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vllm_specrollout.config.places import FILE_MODE, make_folder, opener
from vllm_specrollout.errors import logger
from vllm_specrollout.history.database import (
    ERRORS,
    SUFFIX,
    AnswerCounts,
    Database,
    ForeignError,
    HistoryError,
    OtherRunError,
    files,
    remove,
    size_of,
)
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

T = TypeVar("T")

OWN = re.compile(r"answers-[0-9]{4,5}")
"""Stem of a file that an engine writes."""
FETCHED = re.compile(r"(siblings|strangers)-[0-9]{4}")
"""Stem of a file that a courier writes: answers of the same run on other nodes, and of other runs."""
NEARNESS = {"strangers": 0, "siblings": 1}
_NAMES = re.compile("([0-9a-f]{16}) ([A-Za-z0-9._-]{1,64})")
# of an entry that cannot be opened, where all others may: another user's, a folder, a link, a socket, a device, or one
# that its file server no longer knows
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ESTALE)


class LockedError(HistoryError):
    """Another process writes the file."""


class Lock:
    """Who writes a file, for as long as this is held. A killed process holds none.

    Raises:
        LockedError: another one does.
        HistoryError: the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # whoever had it before may have removed it between the two calls
                if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                os.close(self._fd)
                raise _refused(path, error) from None
            os.close(self._fd)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _refused(path: Path, error: OSError) -> HistoryError:
    if isinstance(error, BlockingIOError):
        cause = f"`{path}` is being written by another process"
        return LockedError(cause, "end the engine that uses this `history.dir` first")
    cause = f"`{path}` cannot be locked: {error.strerror}. Its file system has no file locks, which a history needs"
    return HistoryError(cause, "name a folder on a local disk in `history.dir`")


def is_locked(path: Path) -> bool:
    """Whether some process writes the file now."""
    with contextlib.suppress(FileNotFoundError), path.with_name(path.name + ".lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def names_of(folder: Path, draws: bool = False) -> tuple[str, str]:
    """The folder's name at an archive, and that of the training run where its trainer gives none; both are drawn once,
    but where files of a run are here already.

    Args:
        draws: another name, for a folder that is a copy; the run stays.

    Raises:
        OSError: they can be neither read nor written.
    """
    path = folder / "node"
    try:
        text = path.read_text(errors="replace")[:64]
    except FileNotFoundError:
        text = None
    found = None if text is None else _NAMES.fullmatch(text)
    if found is not None and not draws:
        return found[1], found[2]
    if found is None and text is not None:
        logger.warning("`%s` names no folder, so another name is drawn", path)
    draft = folder / f"node.{secrets.token_hex(8)}"
    with open(draft, "w", opener=opener) as file:
        file.write(f"{secrets.token_hex(8)} {found[2] if found else _run_in(folder)}")
    # whole, or not at all; of those who draw the first names at once, the first one does
    try:
        with contextlib.suppress(FileExistsError):
            (os.link if text is None else os.replace)(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return names_of(folder)


def _run_in(folder: Path) -> str:
    for path in files(folder):
        with contextlib.suppress(HistoryError, *ERRORS):
            if _NAMES.fullmatch(f"{'0' * 16} {(run := Database(path).run)}"):
                return run
    return secrets.token_hex(8)


class Folder:
    """Opens the directory, claims a file in it and reads all others, but for those that it cannot use.

    `refresh`, `remove_stale`, `replace_own` and `close` wait for the disk, and are for one thread at a time.

    Args:
        path: None: the one file is in memory.
        run: of training; empty: the folder's own.

    Raises:
        HistoryError: the directory cannot be used.
    """

    def __init__(self, path: Path | None, vocabulary: Vocabulary = ANY_VOCABULARY, run: str = "") -> None:
        self._path, self._vocabulary = path, vocabulary
        # what is read, the own file too: who looks up answers there does not wait for who writes it
        self._readers: dict[Path, Database] = {}
        # what cannot be used, and why; and what of it was named already
        self._unusable: dict[Path, Exception] = {}
        self._warned: set[Path] = set()
        self.latest_epoch, self.run = 0, run
        # as it was looked at: its files, and when it had changed last
        self._listed = list[Path]()
        self._seen = 0
        self._lock: Lock | None = None
        if path is None:
            self.own = Database(None, writes=True)
            return
        try:
            make_folder(path)
            self.run = run or names_of(path)[1]
        except OSError as error:
            raise self._unkept(error) from None
        self.refresh()
        self.own = self._claim(path)
        self.refresh()

    def _unkept(self, error: OSError) -> HistoryError:
        way = "name another folder in `history.dir`, or see to its permissions"
        return HistoryError(f"the history in `{self._path}` cannot be kept: {error.strerror or error}", way)

    def _claim(self, folder: Path) -> Database:
        for number in range(1 << 16):
            path = folder / f"answers-{number:04d}{SUFFIX}"
            if path in self._unusable:
                continue
            try:
                lock = Lock(path)
            except LockedError:
                continue
            except OSError as error:
                if error.errno in _NOT_OURS and os.path.lexists(path):
                    continue
                raise self._unkept(error) from None
            is_new = not os.path.lexists(path) or not path.lstat().st_size
            try:
                own = Database(path, True, self._vocabulary, self.run)
                self._lock = lock
                return own
            except (HistoryError, OSError) as error:
                lock.release()
                if is_new:
                    # so no other one can be made either
                    raise (self._unkept(error) if isinstance(error, OSError) else error) from None
                if not isinstance(error, OSError):
                    self._unusable[path] = error
        raise HistoryError(f"all {1 << 16} history files in `{folder}` are others'", "name another `history.dir`")

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def sources(self) -> list[Database]:
        """Those of other runs first, then of other nodes, of this one, and the own."""
        if self._path is None:
            return [self.own]
        own = self.own.path
        found = sorted(list(self._readers.items()), key=lambda item: (item[0] == own, item[1].nearness, item[0]))
        return [one for _, one in found if one.failure is None]

    @property
    def foreign(self) -> list[Path]:
        """Files that are left out, since their token ids mean something else."""
        return [path for path, why in list(self._unusable.items()) if isinstance(why, ForeignError)]

    def refresh(self) -> None:
        """Look for files that are new, and for those that are gone. Those that cannot be used are left out, with one
        warning for all."""
        if self._path is None:
            return
        paths = self._listed = files(self._path)
        latest = 0
        # what is gone need not be remembered
        self._unusable = {path: why for path, why in self._unusable.items() if path in paths}
        for path, reader in list(self._readers.items()):
            if reader.failure is not None:
                self._unusable[path] = reader.failure
            if path not in paths or not reader.is_current:
                del self._readers[path]
        for path in paths:
            try:
                if path not in self._readers:
                    self._readers[path] = self._opened(path)
                    self._unusable.pop(path, None)
                if not FETCHED.fullmatch(path.stem):
                    latest = max(latest, self._readers[path].latest_epoch())
            except FileNotFoundError:
                # another process makes it now, or has removed it: it is looked for again
                self._listed, self._seen = [one for one in self._listed if one != path], 0
            except (HistoryError, *ERRORS) as error:
                self._readers.pop(path, None)
                self._unusable[path] = error
        self.latest_epoch = latest
        self._name_unusable()

    @property
    def has_changed(self) -> bool:
        """Whether a file has come or gone since it was looked at; not if nobody can say."""
        with contextlib.suppress(OSError):
            # what comes and goes there is mostly SQLite's own
            if self._path is not None and (seen := self._path.stat().st_mtime_ns) != self._seen:
                self._seen = seen
                return files(self._path) != self._listed
        return False

    def _opened(self, path: Path) -> Database:
        found = Database(path)
        found.nearness = NEARNESS[kind[1]] if (kind := FETCHED.fullmatch(path.stem)) else 2
        try:
            self._expect_ours(found)
        except HistoryError:
            # the error is kept, and would keep it open
            found.close()
            raise
        return found

    def _expect_ours(self, found: Database) -> None:
        path = found.path
        found.expect_run(self.run)
        if not self._vocabulary.fits(found.vocabulary):
            raise ForeignError(
                f"`{path}` was written for `{found.vocabulary.model}`, which has another vocabulary than"
                f" `{self._vocabulary.model}`",
                "give each model its own `history.dir`; nothing else is lost",
            )

    def _name_unusable(self) -> None:
        """Say what is left out: a warning for all that are new."""
        new = [path for path in self._unusable if path not in self._warned]
        self._warned = set(self._unusable)
        if new:
            more = f" ({len(new) - 1} more: {', '.join(path.name for path in new[1:6])})" if new[1:] else ""
            logger.warning("answers of another engine are not used: %s%s", self._unusable[new[0]], more)

    def epochs(self, most: int) -> set[int]:
        """Those of this run that hold answers here, so many of the newest of each file."""
        return set().union(*self._of_each(lambda source: source.epochs(most) if source.nearness == 2 else ()))

    def counts_of_others(self, oldest: int) -> AnswerCounts:
        none, own = AnswerCounts(0, 0, 0), self.own.path
        found = self._of_each(lambda source: source.counts(oldest) if source.path != own else none)
        return AnswerCounts(*map(sum, zip(none, *found, strict=True)))

    def num_bytes(self) -> int:
        """Of all files that are read."""
        return sum(self._of_each(lambda source: size_of(source.path) if source.path is not None else 0))

    def _of_each(self, ask: Callable[[Database], T]) -> list[T]:
        """What all files answer that can be read."""
        found = list[T]()
        for source in self.sources:
            with contextlib.suppress(*ERRORS):
                found.append(ask(source))
        return found

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def remove_stale(self, oldest: int, most_bytes: int) -> None:
        """Remove files that former engines left behind, if none of their answers may draft, or there is no room.

        Only files that an engine here might have written or fetched: named so, of its vocabulary, and nobody's now.
        Those of another run, which may go on here, only go where there is no room.
        """
        others = [path for path, why in self._unusable.items() if isinstance(why, OtherRunError)]
        stale: list[tuple[float, Path, int]] = []
        for path in (*self._readers, *others):
            if path != self.own.path and (OWN.fullmatch(path.stem) or FETCHED.fullmatch(path.stem)):
                # one that its file server no longer knows is nobody's to remove
                with contextlib.suppress(OSError):
                    stale.append((path.stat().st_mtime, path, size_of(path)))
        room = most_bytes - sum(size for _, _, size in stale)
        for _, path, size in sorted(stale):
            # its writer removes the lock: who has it is its writer
            with contextlib.suppress(HistoryError, *ERRORS):
                reader = self._readers.get(path)
                if room >= 0 and (reader is None or reader.counts(oldest).answers):
                    continue
                lock = Lock(path)
                try:
                    if reader is None or reader.is_current:
                        remove(path)
                        self._readers.pop(path, None)
                        room += size
                finally:
                    lock.release()

    def replace_own(self, error: Exception) -> None:
        """Go on in another file: the own one is damaged."""
        if self._path is None or self.own.path is None:
            return
        self._unusable[self.own.path] = error
        self.close()
        self.own = self._claim(self._path)
        self.refresh()

    def close(self) -> None:
        """Let others write the own file."""
        if self._lock is not None and self.own.path is not None:
            # the last one that closes a file removes its log
            self._readers.pop(self.own.path, None)
            try:
                self.own.close()
            finally:
                self._lock.release()
                self._lock = None
