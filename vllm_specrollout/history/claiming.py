"""Which file of a directory a store writes: the first that nobody else does. What cannot be used is one clear error."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from vllm_specrollout.config.places import make_folder
from vllm_specrollout.history.frames import HistoryError
from vllm_specrollout.history.locking import LockedError, lock
from vllm_specrollout.history.log import SUFFIX, Reader, Visit, Writer
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary

# of an entry that cannot be opened, where all others may: another user's, a folder, a link, a socket, a device, or one
# that its file server no longer knows
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ESTALE)


def claim(
    folder: Path,
    visit: Visit | None = None,
    vocabulary: Vocabulary = ANY_VOCABULARY,
    passed_over: Callable[[Path, HistoryError], object] = lambda path, error: None,
) -> Writer:
    """Open the first file of the folder that nobody writes and that is of this vocabulary, or a new one.

    Files of another user, links, and what is no file, are passed over.

    Args:
        passed_over: told of a file that is of another vocabulary, damaged in its header, or no file at all. May raise.

    Raises:
        HistoryError: the folder cannot be used.
    """
    way = "name another folder in `history.dir`, or see to its permissions"
    try:
        make_folder(folder)
    except OSError as error:
        raise HistoryError(f"the history in `{folder}` cannot be kept: {error.strerror}", way) from None
    for number in range(1 << 16):
        path = folder / f"answers-{number:04d}{SUFFIX}"
        try:
            return Writer(path, visit, vocabulary)
        except LockedError:
            continue
        except HistoryError as error:
            passed_over(path, error)
        except OSError as error:
            if error.errno in _NOT_OURS and os.path.lexists(path):
                continue
            raise HistoryError(f"the history in `{folder}` cannot be kept: {error.strerror}", way) from None
    raise HistoryError(f"all {1 << 16} history files in `{folder}` are others'", "name another `history.dir`")


def is_ours_by_name(path: Path) -> bool:
    """Whether an engine named the file, rather than a person."""
    return re.fullmatch(r"answers-[0-9]{4,5}" + re.escape(SUFFIX), path.name) is not None


def unlink_if_unused(reader: Reader) -> bool:
    """Remove a file that no process writes; returns whether it is gone. Who reads it can go on reading."""
    try:
        held = lock(reader.path)
        if not reader.is_current or held.size() != reader.seen_bytes:
            # another file by now, or somebody has written since it was read
            return False
        reader.path.unlink()
    except (HistoryError, OSError):
        return False
    return True
