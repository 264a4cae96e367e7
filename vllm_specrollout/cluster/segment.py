"""A named piece of shared memory with one owner and one guest. It knows nothing of what lies in it but a header.

It is a file in /dev/shm, as those of `multiprocessing.shared_memory` are. That module is not used: before Python 3.13
its resource tracker removes a segment when a process that only attached ends, and warns. Here locks say who lives: the
kernel drops them with their process, so the segment of an owner that was killed is noticed and replaced.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
import weakref
from pathlib import Path

from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.errors import ConfigError, UnsupportedError

FOLDER = Path("/dev/shm")
PREFIX = "specrollout-"
MAGIC = b"SRRING\r\n"
VERSION = 1
HEADER = struct.Struct("=8sIIQ")  # magic, version, 0, bytes of the whole segment
PAGE = 4096
"""Bytes. The header has this much for itself and for its user; sizes are multiples of it."""
MAX_SIZE = 1 << 30
"""Bytes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWNER, _GUEST = 0, 1  # the byte that each of them locks


class Segment:
    """A mapped segment. Lets go of its name at the latest when its process ends in order."""

    def __init__(self, name: str, descriptor: int, size: int, *, is_owner: bool) -> None:
        self.map = mmap.mmap(descriptor, size)
        # in a child made by fork the owner is still the parent
        owned = (_path(name), os.getpid()) if is_owner else None
        self._release = weakref.finalize(self, _release, descriptor, owned)

    def close(self) -> None:
        """Unmap it, and remove its name if this is the owner. Who else has it mapped keeps it.

        Raises:
            BufferError: a view of the map is still in use.
        """
        self._release()
        self.map.close()


def create(name: str, size: int) -> Segment:
    """A new segment of `size` bytes, all 0 behind its header. One whose owner is gone is replaced.

    Raises:
        ConfigError: no segment can have this name or size.
        MailboxError: a living process owns one of this name, or there is no room.
        UnsupportedError: the host has no /dev/shm.
    """
    _check(name, size)
    if not FOLDER.is_dir():
        raise UnsupportedError(f"this host has no {FOLDER}, so nothing is shared", "use an ipc:// address")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{PREFIX}{name}.", dir=FOLDER)  # mode 0600
    except OSError as error:
        raise _no_room(size, error) from None
    try:
        segment = _fill(name, descriptor, size)
        try:
            _publish(temporary, name)
        except BaseException:
            segment.close()
            raise
        return segment
    finally:
        os.unlink(temporary)


def _fill(name: str, descriptor: int, size: int) -> Segment:
    try:
        # before the header: what has a header and no owner was left behind (`sweep`)
        _lock(descriptor, _OWNER)
        os.pwrite(descriptor, HEADER.pack(MAGIC, VERSION, 0, size), 0)
        # reserved now: a page that the host cannot give later would kill the process that touches it
        os.posix_fallocate(descriptor, 0, size)
        return Segment(name, descriptor, size, is_owner=True)
    except OSError as error:
        os.close(descriptor)
        raise _no_room(size, error) from None


def _no_room(size: int, error: OSError) -> MailboxError:
    cause = f"shared memory of {size} bytes cannot be had: {error.strerror or error}"
    return MailboxError(cause, f"free space in {FOLDER} (in a container: raise --shm-size)")


def attach(name: str) -> Segment:
    """The segment that another process created.

    Raises:
        ConfigError: no segment can have this name.
        MailboxError: there is none, it is none of ours or of another version, or it has a guest already.
    """
    _check(name, PAGE)
    path = _path(name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        cause = f"shared memory `{name}` cannot be opened: {error.strerror or error}"
        raise MailboxError(cause, "start the engine that serves it first, as the same user") from None
    try:
        size = _check_header(name, descriptor)
        if not _lock(descriptor, _GUEST):
            cause = f"shared memory `{name}` has a guest already"
            raise MailboxError(cause, "stop that process, or give this one another address")
        return Segment(name, descriptor, size, is_owner=False)
    except BaseException:
        os.close(descriptor)
        raise


def _check(name: str, size: int) -> None:
    if not _NAME.fullmatch(name):
        cause = f"`{name[:140]}` is no name for shared memory"
        raise ConfigError(cause, "use at most 128 letters, digits, dots, dashes and underscores")
    if not PAGE <= size <= MAX_SIZE or size % PAGE:
        cause = f"shared memory of {size} bytes is outside {PAGE} to {MAX_SIZE}, or no multiple of {PAGE}"
        raise ConfigError(cause, "choose another size")


def _check_header(name: str, descriptor: int) -> int:
    """The segment's size."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        whose = f"mode {stat.S_IMODE(status.st_mode):o}, user {status.st_uid}"
        cause = f"shared memory `{name}` is open to others ({whose})"
        raise MailboxError(cause, "remove it, and let the engine make it anew")
    head = os.pread(descriptor, HEADER.size, 0)
    magic, version, _, size = HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, 0)
    if magic != MAGIC:
        raise MailboxError(f"shared memory `{name}` is none of ours", "choose another name")
    if version != VERSION:
        cause = f"shared memory `{name}` has layout version {version}; this end knows {VERSION}"
        raise MailboxError(cause, "run the same version of vllm-specrollout at both ends")
    # the header's word alone would let a shorter file kill the process that reads behind its end
    if size != status.st_size or not PAGE <= size <= MAX_SIZE:
        cause = f"shared memory `{name}` says that it has {size} bytes; it has {status.st_size}"
        raise MailboxError(cause, "remove it, and let the engine make it anew")
    return size


def _publish(temporary: str, name: str) -> None:
    """Give a finished segment its name: nobody ever sees half of one."""
    while True:
        try:
            os.link(temporary, _path(name))
            return
        except FileExistsError:
            _remove_abandoned(name)


def _remove_abandoned(name: str) -> None:
    path = _path(name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MailboxError(f"`{path}` is in the way: {error.strerror or error}", "choose another name") from None
    try:
        if not _lock(descriptor, _OWNER):
            cause = f"shared memory `{name}` is served by another mailbox"
            raise MailboxError(cause, "choose another name, or stop the process that serves it")
        _unlink(path, descriptor)
    finally:
        os.close(descriptor)


def sweep(beginning: str) -> int:
    """Remove what owners of this user left behind that were killed; returns how many segments.

    Only the lock is asked: a process id may be another process's by now, or of another container.

    Args:
        beginning: of their names, which must be such as are never given twice: whoever wanted to serve at one anew
            could find it locked for a moment.
    """
    # beside those that were finished, those whose owner was killed while it made them
    found = [*FOLDER.glob(f"{PREFIX}{beginning}*"), *FOLDER.glob(f".{PREFIX}{beginning}*")]
    return sum(_remove_if_left(path) for path in found)


def _remove_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone, or none of ours
    try:
        status = os.fstat(descriptor)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or os.pread(descriptor, len(MAGIC), 0) != MAGIC or not _lock(descriptor, _OWNER):
            return False
        _unlink(path, descriptor)
        return True
    except OSError:
        return False  # whatever it is, it can stay
    finally:
        os.close(descriptor)


def _unlink(path: Path, descriptor: int) -> None:
    """Remove the name, unless it leads to another file by now."""
    try:
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.unlink(path)
    except FileNotFoundError:
        pass


def _lock(descriptor: int, byte: int) -> bool:
    """Lock one byte for this opening of the file, until it is closed; False: another one has it."""
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        return False
    return True


def _path(name: str) -> Path:
    return FOLDER / f"{PREFIX}{name}"


def _release(descriptor: int, owned: tuple[Path, int] | None) -> None:
    if owned is not None and owned[1] == os.getpid():
        _unlink(owned[0], descriptor)
    os.close(descriptor)
