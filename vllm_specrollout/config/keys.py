"""Keys of what serves engines elsewhere behind tcp. stdlib only.

A key is in a file or a variable, never in an address: those are logged, and whoever is on the host sees them in lists
of processes.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_specrollout.config import envs
from vllm_specrollout.config.places import make_folder, opener
from vllm_specrollout.errors import ConfigError, shown_path

if TYPE_CHECKING:
    from vllm_specrollout.config.engine import SpecRolloutConfig

_KEY = re.compile("[0-9a-f]{64}")


def check_keys(config: SpecRolloutConfig) -> None:
    """See that there is a key for each address behind tcp: a worker's errors are read by few.

    Raises:
        ConfigError: there is none.
    """
    if config.history.url.startswith("tcp:"):
        key_of("history.key_file", config.history.key_file)
    if config.decoupled.address.startswith("tcp:"):
        key_of("decoupled.key_file", config.decoupled.key_file)


def key_of(name: str, key_file: str, makes: bool = False) -> str:
    """The key of an end behind tcp: 64 hexadecimal digits.

    Args:
        name: of what names the file, for messages.
        key_file: with the key in it; empty: as the variable says, which holds the key or such a path.
        makes: the file, where it is not there: for its owner alone.

    Raises:
        ConfigError: there is none.
    """
    given = key_file or os.environ.get(envs.KEY, "").strip()
    if not given:
        raise ConfigError(f"`{name}` names no file with a key, and `{envs.KEY}` is unset", "give one of them")
    if not key_file and _KEY.fullmatch(given):
        return given
    path = Path(given).expanduser()
    try:
        if makes and not path.exists():
            make_folder(path.parent)
            # another one that makes it at this moment is an error, not two keys
            with open(path, "x", opener=opener) as file:
                file.write(secrets.token_hex(32) + "\n")
        with path.open(encoding="ascii", errors="replace") as file:
            found = file.read(4096).strip()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        # what the variable holds may be a key with a slip of the pen in it
        where = shown_path(given) if key_file else f"what `{envs.KEY}` says"
        raise ConfigError(f"no key can be read from {where}: {said}", f"give a file in `{name}`") from None
    if not _KEY.fullmatch(found):
        raise ConfigError(f"{shown_path(given)} holds no key: 64 hexadecimal digits", "copy the file that `serve` made")
    return found
