"""vLLM as it is released for CUDA, of the version that is installed for CPU: `make cuda-wheel` unpacks its Python.

It is read and never imported, so that what runs on a GPU is known to be what tests run on a CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.versions import trees
from vllm_specrollout.patches import supported

FOLDER = trees.FOLDER / "cuda"
PINS = trees.ROOT / "requirements" / "cuda.txt"


def missing() -> str:
    """Why it cannot be read; empty: it can."""
    if (FOLDER / supported.USUAL).is_dir():
        return ""
    return f"no CUDA wheel of vLLM {supported.USUAL} in {trees.FOLDER.name}/: run `make cuda-wheel`"


def main() -> None:
    """Unpack it, unless it is there."""
    if not missing():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    wheel = trees.wheel_of("vllm", supported.USUAL, PINS)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        trees.unpack(wheel, Path(scratch, "tree"), python_only=True)
        Path(scratch, "tree").rename(FOLDER / supported.USUAL)
    # all but its Python is compiled for devices
    wheel.unlink()
    print(f"unpacked: {(FOLDER / supported.USUAL).relative_to(trees.ROOT)}")


if __name__ == "__main__":
    main()
