"""A history file: what its records mean, the one that writes it, the many that read it. No indices, no epochs' logic.

A record is with the operating system when `Writer.append` returns: killed at any point, the process loses at most the
record it was writing. Power is another matter: only what was written before the last `sync` is sure to survive that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from vllm_specrollout.history.frames import (
    HEADER,
    Descriptor,
    Frame,
    HistoryError,
    Scanner,
    Window,
    frame_at,
    new_frame,
    new_header,
    read_header,
)
from vllm_specrollout.history.locking import lock
from vllm_specrollout.history.records import Record, RecordHead, decode_head, decode_record, encode_record
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

SUFFIX = ".history"

Visit = Callable[[Frame, RecordHead], object]


class ForeignError(HistoryError):
    """The file's answers are written in another vocabulary."""


class Reader:
    """Reads a file that another process may be writing. Not for several threads at once, `read` apart."""

    def __init__(self, path: Path, descriptor: Descriptor | None = None) -> None:
        self.path = path
        self.descriptor = descriptor or Descriptor(path, os.O_RDONLY)
        self._scanner: Scanner | None = None
        self._version: int | None = None
        self.seen_bytes = 0
        """Size of the file when it was last read."""
        self.undecodable = 0
        """Records whose checksums are right and whose content is not: a mistake of whoever wrote them."""

    def records(self) -> Iterator[tuple[Frame, RecordHead]]:
        """Records not yet read, in the order they were written; answers without their tokens.

        Raises:
            HistoryError: the file is not a history file, or not one of this version.
        """
        scanner = self.scanner()
        if scanner is None:
            return
        self.seen_bytes = self.descriptor.size()
        for frame in scanner.frames(self.descriptor.fd, self.seen_bytes):
            try:
                yield frame, decode_head(frame.payload)
            except ValueError:
                self.undecodable += 1

    def scanner(self) -> Scanner | None:
        """None: the file has no header yet."""
        if self._scanner is None:
            header = read_header(self.descriptor, self.path)
            if header is not None:
                self._version, self._scanner = header.version, Scanner(header.seed)
        return self._scanner

    @property
    def version(self) -> int | None:
        """Of the file's format; None: it has no header yet."""
        self.scanner()
        return self._version

    def vocabulary(self) -> Vocabulary:
        """What the writer said of its token ids, in the file's first record; files of version 1 say nothing.

        Raises:
            HistoryError: the file is not a history file, or not one of these versions.
        """
        self.scanner()
        payload = self.payload(HEADER.size)
        with contextlib.suppress(ValueError):
            # no more than its head is decoded: it may be a long answer as well
            first = None if payload is None else decode_head(payload)
            return first if isinstance(first, Vocabulary) else ANY_VOCABULARY
        return ANY_VOCABULARY

    def payload(self, offset: int) -> bytes | None:
        """The bytes of the record at this place; None: it was damaged since it was found. Any thread may call this."""
        scanner = self._scanner
        if scanner is None:
            return None
        frame = frame_at(Window(self.descriptor.fd, self.descriptor.size(), 1 << 14), scanner.seed, offset)
        return None if frame is None else frame.payload

    def read(self, offset: int) -> Record | None:
        """The record at this place, likewise."""
        payload = self.payload(offset)
        try:
            return None if payload is None else decode_record(payload)
        except ValueError:
            return None

    @property
    def missing(self) -> int:
        """Frames that were written before others that could be read, and could not be read."""
        return self._scanner.missing if self._scanner else 0

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file, with at least what was read of it; not if nobody can say."""
        position = self._scanner.position if self._scanner else 0
        with contextlib.suppress(OSError):
            return self.descriptor.is_at(self.path) and self.descriptor.size() >= position
        return False


class Writer:
    """The one writer of a file. Opening cuts what a killed writer left behind its last whole record.

    Args:
        visit: called with each record found, in the order they were written.
        vocabulary: that of the answers to come; a new file names it. Default: whatever the file has.

    Raises:
        LockedError: another process writes the file.
        ForeignError: the file holds answers in another vocabulary, or does not say in which.
        HistoryError: the file is not a history file, or of a later version.
    """

    def __init__(self, path: Path, visit: Visit | None = None, vocabulary: Vocabulary = ANY_VOCABULARY) -> None:
        self.path = path
        self._vocabulary = vocabulary
        self.reader = Reader(path, lock(path, create=True))
        self._is_closed = False
        try:
            self._prepare(visit)
        except BaseException:
            self.close(sync=False)
            raise

    def _prepare(self, visit: Visit | None) -> None:
        fd = self.reader.descriptor.fd
        self._spare().unlink(missing_ok=True)
        if self.reader.scanner() is None:
            os.ftruncate(fd, 0)
            _write(fd, new_header(os.urandom(16)), 0)
            self.reader.scanner()
            if self._vocabulary != ANY_VOCABULARY:
                self.append(self._vocabulary)
            # a file without its header, or without its name, would be nobody's after a power cut
            self.sync()
            sync_folder(self.path.parent)
        elif not self._is_ours(self.reader.vocabulary()):
            raise ForeignError(
                f"`{self.path}` holds answers in another vocabulary, or does not say in which",
                "name another `history.dir`",
            )
        for frame, record in self.reader.records():
            if visit is not None:
                visit(frame, record)
        os.ftruncate(fd, self.size)

    def _is_ours(self, found: Vocabulary) -> bool:
        """Whether answers of ours may go into a file of that vocabulary. One that is not known may be any."""
        return self._vocabulary == ANY_VOCABULARY or (found != ANY_VOCABULARY and self._vocabulary.fits(found))

    @property
    def size(self) -> int:
        """Bytes up to the end of the last whole record."""
        scanner = self.reader.scanner()
        assert scanner is not None, "the header was written on opening"
        return scanner.position

    def append(self, record: Record | bytes) -> Frame:
        """Hand a record, or its bytes, to the operating system; returns its place, without payload.

        Raises:
            OSError: the disk is full or gone. The file is as it was before.
        """
        scanner = self.reader.scanner()
        assert scanner is not None, "the header was written on opening"
        if self._is_closed:
            raise OSError(errno.EBADF, "closed, and perhaps another process's by now", str(self.path))
        frame = Frame(scanner.position, scanner.next_sequence, b"")
        payload = record if isinstance(record, bytes) else encode_record(record)
        data = new_frame(scanner.seed, frame.sequence, payload)
        _write(self.reader.descriptor.fd, data, frame.offset)
        scanner.note(frame.sequence)
        scanner.position += len(data)
        return frame

    def sync(self) -> None:
        """Wait until all records are on disk."""
        os.fsync(self.reader.descriptor.fd)

    def rewrite(
        self, records: Iterable[Record | bytes], placed: Callable[[Frame], object] = lambda frame: None
    ) -> Frame:
        """Put a file with these records, and no others, in this one's place; returns where the last one now is.

        Args:
            placed: told where each of them is.

        A crash leaves either the old file or the new one, whole. Who has the old one open can still read it.

        Raises:
            OSError: the disk is full or gone; this file stays.
        """
        spare = self._spare()
        spare.unlink(missing_ok=True)
        try:
            copy = Writer(spare, vocabulary=self.reader.vocabulary())
            frame = Frame(HEADER.size, 0, b"")
            for record in records:
                frame = copy.append(record)
                placed(frame)
            copy.sync()
            # who made the file wider than ours are meant to share it
            os.chmod(spare, stat.S_IMODE(os.fstat(self.reader.descriptor.fd).st_mode))
            os.rename(spare, self.path)
        except BaseException:
            spare.unlink(missing_ok=True)
            raise
        sync_folder(self.path.parent)
        copy.reader.path = self.path
        fcntl.flock(self.reader.descriptor.fd, fcntl.LOCK_UN)
        self.reader = copy.reader
        return frame

    def close(self, sync: bool = True) -> None:
        """Let others write the file. Readers may go on."""
        self._is_closed = True
        try:
            if sync:
                self.sync()
        finally:
            # explicitly: readers share the descriptor, and the lock with it
            fcntl.flock(self.reader.descriptor.fd, fcntl.LOCK_UN)

    def _spare(self) -> Path:
        return self.path.with_name(self.path.name + ".new")


def files(folder: Path) -> list[Path]:
    """The folder's history files, by name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(fd, view, offset + len(data) - len(view))
            view = view[count:]
    except OSError:
        os.ftruncate(fd, offset)
        raise


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
