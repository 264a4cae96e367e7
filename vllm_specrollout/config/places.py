"""Files and folders that a configuration names: made for their owner alone, and tried before an engine starts.

What holds prompts, answers or ids is its owner's, whatever the umask; what is there already keeps its mode, as whoever
made it wider meant to share it. A worker would find out as well what cannot be used, in a process whose errors few
people read. stdlib only.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vllm_specrollout.errors import ConfigError, shown_path

if TYPE_CHECKING:
    from vllm_specrollout.config.engine import SpecRolloutConfig

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


def check_places(config: SpecRolloutConfig) -> None:
    """Make the folders that are to be written, and see whether they can be.

    Raises:
        ConfigError: the first that cannot be used.
    """
    if config.history.dir:
        _check_folder("history.dir", config.history.dir)
    if config.record is not None:
        _check_file("record", config.record)


def _check_folder(name: str, path: str) -> None:
    try:
        make_folder(Path(path))
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ConfigError(
            f"`{name}` is {shown_path(path)}, which cannot be used: {error.strerror or error}",
            "name a folder that can be made and written, or see to its permissions",
        ) from None


def _check_file(name: str, path: str) -> None:
    """It is opened, and emptied, by the engine alone."""
    problem = _problem_of_file(path)
    if problem:
        cause = f"`{name}` is {shown_path(path)}, which cannot be used: {problem}"
        raise ConfigError(cause, "name a file in an existing folder that can be written")


def _problem_of_file(path: str) -> str:
    """Why a file could not be written; empty: it could."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        # a link may lead elsewhere
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            return f"there is no folder {shown_path(folder)}"
        return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {shown_path(folder)} cannot be written"
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    return "" if os.access(path, os.W_OK) else "it cannot be written"
