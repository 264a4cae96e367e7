"""Starts the tests of the V2 model runner, which need a process of their own; see tests/v2/conftest.py."""

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
def test_the_v2_runner_passes_its_tests_under_tritons_interpreter() -> None:
    env = {**os.environ, "SPECROLLOUT_V2_TESTS": "1"}
    command = [sys.executable, "-m", "pytest", "tests/v2", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=850)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
