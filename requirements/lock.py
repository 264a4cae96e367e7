"""Writes requirements/*.txt: every pin of the *.in files beside them, with the hashes of its files on the index.

    python requirements/lock.py [NAME.in ...]

It asks `uv` for what the index says of each pin, and resolves nothing: the *.in files name every package and version.
Hashes are kept of the wheels for Linux (x86_64, aarch64) and Python 3.11 and 3.12, and of the source of a package with
no such wheel. A pin that comes with hashes of its own in an *.in file is taken over as it is: that is for builds that
lie on another index. `make lock` runs this; look at the difference before you commit it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
HEAD = "# Written by requirements/lock.py (`make lock`) from {name}: change that, not this.\n"
PYTHONS = (11, 12)
PLATFORM = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)")


def pins(text: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(name, version, hashes that the file itself gives) of every pin in a requirement file, with or without hashes."""
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if line:
            pin, *given = line.split()
            name, _, version = pin.partition("==")
            yield name, version, tuple(word.removeprefix("--hash=") for word in given)


def lock(source: Path) -> str:
    """The text of the file with hashes."""
    found = list(pins(source.read_text(encoding="utf-8")))
    asked = [(name, version) for name, version, given in found if not given]
    on_index = {pin: hashes for batch in _batches(asked) for pin, hashes in _ask(batch)}
    lines = [HEAD.format(name=source.name)]
    for name, version, given in found:
        hashes = given or on_index[canonicalize_name(name), version]
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash={one}" for one in hashes)]) + "\n")
    return "".join(lines)


def _batches(asked: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """As few lists as possible that name no package twice: `versions.in` has several versions of one."""
    batches: list[list[tuple[str, str]]] = []
    for pin in asked:
        for batch in batches:
            if pin[0] not in (name for name, _ in batch):
                batch.append(pin)
                break
        else:
            batches.append([pin])
    return batches


def _ask(batch: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], list[str]]]:
    with tempfile.TemporaryDirectory() as scratch:
        wanted, answer = Path(scratch, "wanted.in"), Path(scratch, "pylock.toml")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in batch), encoding="utf-8")
        options = ["--quiet", "--no-deps", "--universal", "--python-version", f"3.{PYTHONS[0]}"]
        options += ["--format", "pylock.toml", "--output-file", str(answer)]
        subprocess.run(["uv", "pip", "compile", *options, str(wanted)], check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(answer.read_text(encoding="utf-8"))["packages"]
    for package in packages:
        yield (canonicalize_name(package["name"]), package["version"]), _hashes(package)


def _hashes(package: dict[str, Any]) -> list[str]:
    files = [file for file in package.get("wheels", ()) if _fits(_name_of(file))]
    if not files and "sdist" in package:
        files = [package["sdist"]]
    if not files:
        raise SystemExit(f"{package['name']} {package['version']} has no file for the platforms that are supported")
    return sorted(f"sha256:{file['hashes']['sha256']}" for file in files)


def _name_of(file: dict[str, Any]) -> str:
    return file.get("name") or unquote(urlsplit(file["url"]).path.rpartition("/")[2])


def _fits(wheel: str) -> bool:
    """Whether a wheel can be installed somewhere that is supported."""
    for tag in parse_wheel_filename(wheel)[3]:
        version = re.fullmatch(r"(?:py|cp)3(\d*)", tag.interpreter)
        if version is None or not PLATFORM.fullmatch(tag.platform):
            continue
        minor = int(version[1] or 0)
        if minor in PYTHONS or (tag.abi in ("none", "abi3") and minor <= max(PYTHONS)):
            return True
    return False


def main() -> None:
    sources = [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.in"))
    for source in sources:
        source.with_suffix(".txt").write_text(lock(source), encoding="utf-8")
        print(f"written: {source.with_suffix('.txt').name}")


if __name__ == "__main__":
    main()
