"""Tests that run in processes of their own, beside all others rather than before or after them.

Kernels and the V2 runner have to: Triton decides whether to interpret when a kernel is decorated, so whatever imports a
kernel first decides for all. The benchmarks' tests only start engines and wait for them, so others may run meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "kernels",
    "v2",
    "integration/test_bench.py",
    "integration/test_first_hour.py",
)
STARTED_BY = "test_own_processes.py"


class Beside:
    """Runs them one after the other, in a thread."""

    def __init__(self) -> None:
        self._done: dict[str, subprocess.CompletedProcess[str]] = {}
        self._ended = {folder: threading.Event() for folder in FOLDERS}
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, folder: str) -> subprocess.CompletedProcess[str]:
        """What became of these tests; waits for them."""
        self._ended[folder].wait()
        return self._done[folder]

    def stop(self) -> None:
        """End what still runs: nobody waits for it any more."""
        self._is_stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        for folder in FOLDERS:
            if self._is_stopped:
                return
            command = [
                sys.executable,
                "-m",
                "pytest",
                f"tests/{folder}",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not gpu",
            ]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            output, _ = self._process.communicate()
            self._done[folder] = subprocess.CompletedProcess(command, self._process.returncode, output)
            self._ended[folder].set()
