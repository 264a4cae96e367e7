"""What a history file is made of: a header, then frames, each with checksums. Bytes only; log.py says what they mean.

    header  magic 8 | version u32 | identity 16 | crc32 u32
    frame   marker 4 | length u32 | sequence u32 | crc32 of these, u32 | crc32 of the payload, u32 | payload

All little-endian. Both checksums of a frame start from the file's identity, so a frame of another file (or of this file
before it was rewritten) is no frame here. Sequence numbers count the frames of a file from 0, so what is read twice is
noticed, and so is what is missing. A later version keeps the header's layout.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_specrollout.config.places import FILE_MODE
from vllm_specrollout.errors import SpecRolloutError

MAGIC = b"SRHIST\r\n"
VERSION = 2
READABLE = (1, 2)
"""Version 1 lacks the record that names the writer's vocabulary; all else is the same."""
HEADER = struct.Struct("<8sI16sI")
MARKER = b"\xf5SR\n"
FRAME = struct.Struct("<4sIIII")
MAX_PAYLOAD = 1 << 26
"""Bytes. A length above it is damage."""

_CHUNK = 1 << 20
# frames that a file may have lost, beside those that its size has room for; a number above that is damage or malice,
# and no memory is spent on it
_MOST_MISSING = 1 << 16
# bytes of damaged payloads, in sizes of the file, after which a frame's own word for its length is taken
_MOST_REREAD = 4


class HistoryError(SpecRolloutError):
    """A history file, or a directory of them, cannot be used."""


class Descriptor:
    """An open file that closes with its last user: a reader may still be at an answer when the file is replaced.

    Raises:
        HistoryError: it is no regular file; with `O_NOFOLLOW`, a link.
        OSError: it cannot be opened.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = -1
        if flags & os.O_NOFOLLOW and path.is_symlink():
            raise HistoryError(f"`{path}` is a link, and where it leads is not written", "name the file it leads to")
        # a pipe without anybody at its other end is not waited for
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            raise HistoryError(f"`{path}` is no regular file", "move it out of the directory")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def is_at(self, path: Path) -> bool:
        """Whether the path still leads to this file: not once it was removed or another one put in its place."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path))
        except FileNotFoundError:
            return False


class Frame(NamedTuple):
    # of its marker, in bytes
    offset: int
    sequence: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + FRAME.size + len(self.payload)


def new_header(identity: bytes) -> bytes:
    start = HEADER.pack(MAGIC, VERSION, identity, 0)[:-4]
    return start + struct.pack("<I", zlib.crc32(start))


class Header(NamedTuple):
    version: int
    # of the checksums of the file's frames
    seed: int


def read_header(descriptor: Descriptor, path: Path) -> Header | None:
    """The file's header; None for a file that was never written to, or not even its whole header.

    Raises:
        HistoryError: the file is not a history file, its header is damaged, or a later version wrote it.
    """
    data = os.pread(descriptor.fd, HEADER.size, 0)
    starts = [HEADER.pack(MAGIC, version, b"", 0)[: min(len(data), 12)] for version in READABLE]
    if len(data) < HEADER.size and data[:12] in starts:
        return None
    if data[: len(MAGIC)] != MAGIC:
        raise HistoryError(
            f"`{path}` does not start like a history file (format version {VERSION})",
            "move it out of the directory, or name another directory in `history.dir`",
        )
    if len(data) < HEADER.size or struct.unpack("<I", data[-4:])[0] != zlib.crc32(data[:-4]):
        raise HistoryError(
            f"the header of `{path}` (format version {VERSION}) is damaged, so none of its records can be trusted",
            "move the file out of the directory: only the answers in it are lost, and drafts for them",
        )
    _, version, identity, _ = HEADER.unpack(data)
    if version not in READABLE:
        raise HistoryError(
            f"`{path}` has format version {version}, and this vllm-specrollout reads versions 1 to {VERSION}",
            "run the vllm-specrollout that wrote it, or move the file out of the directory",
        )
    return Header(version, zlib.crc32(identity))


def expect_history(descriptor: Descriptor, path: Path) -> None:
    """A history file may be damaged, or of any version; what does not begin like one is something else.

    Raises:
        HistoryError: it is something else.
    """
    start = os.pread(descriptor.fd, len(MAGIC), 0)
    if not MAGIC.startswith(start):
        raise HistoryError(f"`{path}` does not start like a history file, so it stays", "remove it by hand, if at all")


def new_frame(seed: int, sequence: int, payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record of {len(payload)} bytes, above the {MAX_PAYLOAD} that one may have")
    start = FRAME.pack(MARKER, len(payload), sequence, 0, 0)[:12]
    head = zlib.crc32(start, seed)
    return start + struct.pack("<II", head, zlib.crc32(payload, head)) + payload


class Window:
    """Reads of a file through one buffer, never beyond `end`; it holds what was there when it was filled."""

    def __init__(self, fd: int, end: int, chunk: int = _CHUNK) -> None:
        self._fd = fd
        self.end = end
        self._chunk = chunk
        self._start = 0
        self._data = b""

    def take(self, offset: int, count: int) -> bytes:
        count = max(0, min(count, self.end - offset))
        start = offset - self._start
        if start < 0 or start + count > len(self._data):
            self._data = os.pread(self._fd, min(max(count, self._chunk), self.end - offset), offset)
            self._start, start = offset, 0
        return self._data[start : start + count]

    def find(self, pattern: bytes, offset: int) -> int:
        """Where the pattern next starts, at or after `offset`; -1: nowhere."""
        while offset + len(pattern) <= self.end:
            # fills the buffer if less than the pattern is left of it
            if len(self.take(offset, len(pattern))) < len(pattern):
                return -1
            found = self._data.find(pattern, offset - self._start)
            if found >= 0:
                found += self._start
                return found if found + len(pattern) <= self.end else -1
            offset = self._start + len(self._data) - len(pattern) + 1
        return -1


class _Head(NamedTuple):
    """What a frame says of itself, with the right checksum."""

    sequence: int
    # bytes of its payload
    length: int
    # checksums: its own, and its payload's
    own: int
    payload: int


def _head_at(window: Window, seed: int, offset: int) -> _Head | None:
    start = window.take(offset, FRAME.size)
    if len(start) < FRAME.size:
        return None
    marker, length, sequence, own, payload = FRAME.unpack(start)
    # what claims to go on beyond the end is not read at all
    if marker != MARKER or length > min(MAX_PAYLOAD, window.end - offset - FRAME.size):
        return None
    return _Head(sequence, length, own, payload) if zlib.crc32(start[:12], seed) == own else None


def _payload_at(window: Window, head: _Head, offset: int) -> bytes | None:
    payload = window.take(offset + FRAME.size, head.length)
    return payload if len(payload) == head.length and zlib.crc32(payload, head.own) == head.payload else None


def frame_at(window: Window, seed: int, offset: int) -> Frame | None:
    """The frame at this very place, if it is whole and both its checksums are right."""
    head = _head_at(window, seed, offset)
    payload = None if head is None else _payload_at(window, head, offset)
    return None if head is None or payload is None else Frame(offset, head.sequence, payload)


class Scanner:
    """Reads a file's frames in order, as far as it goes, and later what was added. Bad stretches are stepped over."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = HEADER.size
        """Bytes. Where the last good frame ended."""
        self.damaged = 0
        """Stretches without a good frame, between good ones."""
        self.repeated = 0
        """Frames that were there before."""
        # [sequence] 1 where the frame of that number was read; frames are numbered densely
        self._seen = bytearray()

    @property
    def next_sequence(self) -> int:
        return len(self._seen)

    @property
    def missing(self) -> int:
        """Frames that were written before others that could be read, and could not be read."""
        return len(self._seen) - sum(self._seen)

    def frames(self, fd: int, end: int) -> Iterator[Frame]:
        """Frames not yet read that end by `end`; what follows the last one is looked at again the next time."""
        window = Window(fd, end)
        offset, spare = self.position, _MOST_REREAD * end
        while offset < end:
            head = _head_at(window, self.seed, offset)
            payload = None if head is None else _payload_at(window, head, offset)
            if head is None or payload is None:
                # not past the claimed length, as a piece of the payload may be missing; but payloads that overlap, each
                # of them damaged, would be read again and again
                spare -= 0 if head is None else head.length
                offset = window.find(MARKER, offset + (1 if head is None or spare >= 0 else FRAME.size + head.length))
                if offset < 0:
                    return
                continue
            self.damaged += offset > self.position
            frame = Frame(offset, head.sequence, payload)
            offset = self.position = frame.end
            if frame.sequence <= end // FRAME.size + _MOST_MISSING and self.note(frame.sequence):
                yield frame
            else:
                self.repeated += 1

    def note(self, sequence: int) -> bool:
        """Whether this number is new; from now on it is not."""
        if sequence >= len(self._seen):
            self._seen.extend(bytes(sequence + 1 - len(self._seen)))
        was_new = not self._seen[sequence]
        self._seen[sequence] = 1
        return was_new
