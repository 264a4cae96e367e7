"""A digest of the code, which stands for its commit where there is no git; and the code's installation beside a kit.

Run by path, it installs this project and prints the folder to put on PYTHONPATH, whose name begins with the digest.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = Path.home() / ".cache" / "vllm-specrollout" / "first-hour"
"""Folder in which installations are kept."""
VARIABLE = "SPECROLLOUT_SOURCE"
"""Holds the digest of what was installed, where an installed package cannot tell."""
ALL = ("vllm_specrollout", "kernels", "patches", "bench", "packages", "csrc", "setup.py", "pyproject.toml")
_ENDINGS = (".py", ".cc", ".h", ".toml", ".sh")
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
_OPTIONS = ["--no-index", "--no-deps", "--no-cache-dir"]


def digest(root: Path) -> str:
    """Of all files below `root` that decide what is measured."""
    found = hashlib.sha256()
    for part in ALL:
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


def install(root: Path, work: Path) -> Path:
    """The folder with this code installed; it is compiled at most once there."""
    site = work / "site" / f"{digest(root)}-{sys.implementation.cache_tag}"
    if not (site / ".ready").exists():
        with tempfile.TemporaryDirectory() as scratch:
            _pip("wheel", *_OPTIONS, "--no-build-isolation", "-w", scratch, str(root))
            shutil.rmtree(site, ignore_errors=True)
            _pip("install", *_OPTIONS, "--no-compile", "--target", str(site), *map(str, Path(scratch).glob("*.whl")))
        (site / ".ready").touch()
    return site


def _pip(command: str, *arguments: str) -> None:
    # standard output is for the answer
    done = subprocess.run([*_PIP, command, *arguments], stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"error: `pip {command}` failed with status {done.returncode}\n\nhint: what it said stands above")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--root", type=Path, required=True)
    # the rest is the command's own
    args, _ = parser.parse_known_args()
    print(install(args.root.resolve(), WORK))
