"""Which file of a directory a store writes: the first that nobody else does. What cannot be used is one clear error."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_specrollout.history.frames import HistoryError
from vllm_specrollout.history.log import SUFFIX, ForeignError, LockedError, Visit, Writer
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.private import make_folder


def claim(folder: Path, visit: Visit | None = None, vocabulary: Vocabulary = ANY_VOCABULARY) -> Writer:
    """Open the first file of the folder that nobody writes and that is of this vocabulary, or a new one.

    Files of another user, and what is no file, are passed over.

    Raises:
        HistoryError: the folder cannot be used, or a file of it is damaged in its header.
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
        except (LockedError, ForeignError):
            continue
        except OSError as error:
            if isinstance(error, (PermissionError, IsADirectoryError)) and os.path.lexists(path):
                continue
            raise HistoryError(f"the history in `{folder}` cannot be kept: {error.strerror}", way) from None
    raise HistoryError(f"all {1 << 16} history files in `{folder}` are others'", "name another `history.dir`")
