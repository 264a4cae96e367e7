"""Files and folders that hold prompts, answers or ids: made for their owner alone, whatever the umask. stdlib only.

What is there already keeps its mode: whoever made it wider meant to share it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            try:
                folder.mkdir(FOLDER_MODE)
            except FileExistsError:
                # another process was first; or it is a file
                if not folder.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`."""
    return os.open(path, flags, FILE_MODE)


def new_file(path: Path) -> IO[bytes]:
    """Open a file for writing, empty.

    Raises:
        OSError: it cannot be made.
    """
    return open(path, "wb", opener=opener)
