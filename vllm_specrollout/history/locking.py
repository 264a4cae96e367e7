"""Who writes a history file: one process at a time, for as long as it has the file open. No formats."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vllm_specrollout.history.frames import Descriptor, HistoryError


class LockedError(HistoryError):
    """Another process writes the file."""


def is_locked(path: Path) -> bool:
    """Whether some process writes the file now."""
    descriptor = Descriptor(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def lock(path: Path, create: bool = False) -> Descriptor:
    """Open a file for as long as the descriptor lives, so that no other process writes it meanwhile.

    No link is followed: what it leads to is not ours to write.

    Raises:
        LockedError: another process writes it.
    """
    # a lock of the open file (flock), not of the process (lockf): closing a reader of the same file keeps it. NFS makes
    # the one into the other: there the lock is lost with the first reader that closes, so a directory on NFS is for one
    # engine alone
    while True:
        descriptor = Descriptor(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0))
        try:
            fcntl.flock(descriptor.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"`{path}` is being written by another process", "end the engine that uses this `history.dir` first"
            ) from None
        # its writer may have put another file in its place between the two calls
        if descriptor.is_at(path):
            return descriptor
