"""Starts the tests whose imports must see a Triton that interprets, each folder in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["kernels", "v2"])
def test_a_folder_passes_its_tests_under_tritons_interpreter(folder: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", f"tests/{folder}", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=850)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
