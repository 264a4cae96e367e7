"""A digest of the code, which stands for its commit where there is no git; and the code's installation beside a kit.

Run by path, it installs this project, compiling it at most once, and prints the folder to put on PYTHONPATH, whose name
begins with the digest. The compiled extension is kept where the caches are packed from, so a machine that starts bare
compiles nothing, unless its sources are others. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

WORK = Path.home() / ".cache" / "vllm-specrollout" / "first-hour"
"""Folder in which everything is built and kept, unless told otherwise."""
VARIABLE = "SPECROLLOUT_SOURCE"
"""Holds the digest of what was installed, where an installed package cannot tell."""
ALL = ("vllm_specrollout", "kernels", "patches", "bench", "csrc", "setup.py", "pyproject.toml")
COMPILED = ("csrc", "setup.py")
_ENDINGS = (".py", ".cc", ".h", ".toml", ".sh")
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
_OPTIONS = ["--no-index", "--no-deps", "--no-cache-dir"]
_EXTENSION = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


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


def install(root: Path, work: Path, earlier: list[Path]) -> Path:
    """The folder with this code installed.

    Args:
        earlier: folders that may hold an archive with the extension.
    """
    site = work / "site" / f"{digest(root)}-{sys.implementation.cache_tag}"
    if (site / ".ready").exists():
        return site
    for folder in earlier:
        if (archive := folder / "cache-build-0.tar.xz").exists():
            with tarfile.open(archive, "r:xz") as tar:
                tar.extractall(work / "build", filter="data")
    kept = work / "build" / digest(root, COMPILED) / _EXTENSION
    # where setuptools looks for what it has compiled before
    built = root / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "vllm_specrollout"
    if kept.exists():
        built.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, built / _EXTENSION)
    with tempfile.TemporaryDirectory() as scratch:
        _pip("wheel", *_OPTIONS, "--no-build-isolation", "-w", scratch, str(root))
        shutil.rmtree(site, ignore_errors=True)
        _pip("install", *_OPTIONS, "--no-compile", "--target", str(site), *map(str, Path(scratch).glob("*.whl")))
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(site / "vllm_specrollout" / _EXTENSION, kept)
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
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, action="append", default=[])
    # the rest is the command's own
    args, _ = parser.parse_known_args()
    out = args.out or Path(os.environ.get("OUT") or args.root / "out" / "first-hour")
    print(install(args.root.resolve(), args.work.resolve(), [*args.resume, out]))
