"""`specrollout doctor --gpu` with the device that every host has: the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm import envs

from bench.runner import interpreter
from vllm_specrollout.cli import device_check

# Triton is told before anything is imported, in the process that checks as well
_SITE = """
import sys
if "vllm_specrollout.server.device_check" in " ".join(sys.orig_argv):
    import tests.v2.interpreter
"""


def test_doctor_checks_the_interpreted_device_and_prints_one_screen(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        **interpreter.ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "VLLM_CACHE_ROOT": envs.VLLM_CACHE_ROOT,  # vLLM's own is not empty, as on a host that has served
    }
    command = [sys.executable, "-c", "from vllm_specrollout.cli import main; main()", "doctor", "--gpu", "--json"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "passed" and {"verify", "tree attention", "commit", "chains", "trees"} <= set(
        found["passed"]
    )
    assert len(device_check.DeviceReport(found, 0, ()).as_text().splitlines()) <= 24
    assert list((tmp_path / "cache/vllm-specrollout/self-check").glob("*.passed"))


@pytest.mark.nightly
def test_a_host_without_a_device_is_one_clear_error() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in interpreter.ENVIRONMENT}
    command = [sys.executable, "-c", "from vllm_specrollout.cli import main; main()", "doctor", "--gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and "hint:" in done.stderr
