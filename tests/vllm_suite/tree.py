"""vLLM's own tests, from its source into `.versions/suite`, and models under the names that they ask for.

    python -m tests.vllm_suite.tree

Nothing there is changed. The package is not taken: it would shadow the installed one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.versions.trees import FOLDER, PINS, _pinned
from tests.vllm_suite.hub import make_hub
from vllm_specrollout.patches import supported

SUITE = FOLDER / "suite"
PACKAGES = SUITE / "packages"
HUB = SUITE / "hub"
SUITE_PINS = PINS.with_name("suite.txt")


def fetch() -> None:
    """The tests of the supported version, and what they import."""
    SUITE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=SUITE) as scratch:
        pins = Path(scratch, "pins.txt")
        pins.write_text("".join(pin for name, _, pin in _pinned(SUITE_PINS) if name != "vllm"))
        packages = ["--only-binary", ":all:", "--target", str(PACKAGES), "--upgrade", "-r", str(pins)]
        subprocess.run([*pip, "install", "--no-deps", "--require-hashes", *packages], check=True)
        pins.write_text("".join(pin for name, _, pin in _pinned(SUITE_PINS) if name == "vllm"))
        # pip compares the hash, unpacks the source and asks how it would be built. That may fail, and is of no interest
        kept = ["--no-clean", "--no-build-isolation", "--no-binary", "vllm", "--dest", scratch, "-r", str(pins)]
        done = subprocess.run(
            [*pip, "download", "--no-deps", "--require-hashes", *kept],
            env={**os.environ, "TMPDIR": scratch, "VLLM_TARGET_DEVICE": "empty"},
            capture_output=True,
            text=True,
        )
        found = next(Path(scratch).glob("pip-download-*/vllm*/tests"), None)
        if found is None:
            raise SystemExit(f"error: no tests in the source of vLLM\n{done.stderr}")
        for folder in (found, found.parent / "docs"):
            shutil.rmtree(SUITE / folder.name, ignore_errors=True)
            folder.rename(SUITE / folder.name)
        shutil.copy(found.parent / "pyproject.toml", SUITE / "theirs.toml")
    (SUITE / "version").write_text(supported.USUAL)


def main() -> None:
    """Fetch them, unless they are there, and make the models."""
    if not (SUITE / "version").exists() or (SUITE / "version").read_text() != supported.USUAL:
        fetch()
        print(f"unpacked: {SUITE.relative_to(FOLDER.parent)}/tests")
    make_hub(HUB, SUITE / "docs")


if __name__ == "__main__":
    main()
