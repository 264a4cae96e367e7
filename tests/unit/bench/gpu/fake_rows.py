"""Rows that go well or badly, as told; measured in a child of the GPU measurements."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from bench.gpu.runner import NotMeasured
from bench.runner.leash import Leash


class Rows:
    def __init__(self, setup, rows):
        if setup.get("fails"):
            raise RuntimeError("no setup today")
        self._expected = [row["kind"] for row in rows]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self, params):
        return getattr(self, f"_{params['kind']}")(params)

    def _fine(self, params):
        return {"is_right": params.get("is_right", True), "pid": os.getpid(), "expected": self._expected}

    def _raises(self, _):
        raise ValueError("a row that cannot be")

    def _refuses(self, _):
        raise NotMeasured("not this one")

    def _speaks_python(self, _):
        return {"value": object()}

    def _segfaults(self, _):
        ctypes.string_at(0)

    def _hangs(self, _):
        time.sleep(1000)

    def _leaves(self, _):
        os._exit(7)

    def _starts_others(self, _):
        """As an engine: in a session of its own."""
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        self._leash = Leash(other.pid)
        return {"pid": other.pid}
