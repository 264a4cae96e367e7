"""Installs this project beside a kit, compiling it at most once; prints the folder to put on PYTHONPATH. Run by path.

The compiled extension is kept where the caches are packed from, so a machine that starts bare compiles nothing, unless
its sources are others. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import source

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
_EXTENSION = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
_OPTIONS = ["--no-index", "--no-deps", "--no-cache-dir"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=source.WORK)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, action="append", default=[])
    # the rest is the command's own
    args, _ = parser.parse_known_args()
    out = args.out or Path(os.environ.get("OUT") or args.root / "out" / "first-hour")
    print(install(args.root.resolve(), args.work.resolve(), [*args.resume, out]))


def install(root: Path, work: Path, earlier: list[Path]) -> Path:
    """The folder with this code installed.

    Args:
        earlier: folders that may hold an archive with the extension.
    """
    site = work / "site" / f"{source.digest(root)}-{sys.implementation.cache_tag}"
    if (site / ".ready").exists():
        return site
    for folder in earlier:
        _unpack(folder / "cache-build-0.tar.xz", work / "build")
    kept = work / "build" / source.digest(root, source.COMPILED) / _EXTENSION
    # where setuptools looks for what it has compiled before
    built = root / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "vllm_specrollout"
    if kept.exists():
        built.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, built / _EXTENSION)
    with tempfile.TemporaryDirectory() as scratch:
        _run([*_PIP, "wheel", *_OPTIONS, "--no-build-isolation", "-w", scratch, str(root)])
        shutil.rmtree(site, ignore_errors=True)
        wheels = [str(path) for path in Path(scratch).glob("*.whl")]
        _run([*_PIP, "install", *_OPTIONS, "--no-compile", "--target", str(site), *wheels])
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(site / "vllm_specrollout" / _EXTENSION, kept)
    (site / ".ready").touch()
    return site


def _unpack(archive: Path, target: Path) -> None:
    if archive.exists():
        with tarfile.open(archive, "r:xz") as tar:
            tar.extractall(target, filter="data")


def _run(command: list[str]) -> None:
    # standard output is for the answer
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"error: `pip {command[5]}` failed with status {done.returncode}\n\nhint: what it said stands above")


if __name__ == "__main__":
    main()
