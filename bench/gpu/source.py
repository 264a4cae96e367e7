"""A digest of the code, which stands for its commit where there is no git. Also run by path, before all else.

Usage: python source.py [ROOT]    prints the digest of the checkout that holds this file, or of ROOT
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

WORK = Path.home() / ".cache" / "vllm-specrollout" / "first-hour"
"""Where everything is built and kept, unless told otherwise."""
VARIABLE = "SPECROLLOUT_SOURCE"
"""Holds the digest of what was installed, where an installed package cannot tell."""
ALL = ("vllm_specrollout", "kernels", "patches", "bench", "csrc", "setup.py", "pyproject.toml")
COMPILED = ("csrc", "setup.py")
_ENDINGS = (".py", ".cc", ".h", ".toml", ".sh")


def digest(root: Path, parts: tuple[str, ...] = ALL) -> str:
    """Of all files below `root` that decide what is measured, or of some of them."""
    found = hashlib.sha256()
    for part in parts:
        path = root / part
        for file in sorted(path.rglob("*") if path.is_dir() else [path]):
            if file.is_file() and file.suffix in _ENDINGS:
                found.update(f"{file.relative_to(root)}\0".encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def of_this_process() -> str:
    """The digest of the code that runs here."""
    # in a checkout and in an installed package alike, two folders above this one
    return os.environ.get(VARIABLE) or digest(Path(__file__).resolve().parents[2])


if __name__ == "__main__":
    print(digest(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]))
