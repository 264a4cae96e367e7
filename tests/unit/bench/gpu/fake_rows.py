"""Rows that go well or badly, as told; measured in a child of the GPU measurements."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from bench.gpu import child
from bench.gpu.child import NotMeasured
from bench.runner.leash import Leash


class Rows(child.Rows):
    def __init__(self, setup, rows):
        if setup.get("fails"):
            raise RuntimeError("no setup today")
        self._expected = [row["kind"] for row in rows]

    def fine(self, params):
        return {"is_right": params.get("is_right", True), "pid": os.getpid(), "expected": self._expected}

    def raises(self, _):
        raise ValueError("a row that cannot be")

    def refuses(self, _):
        raise NotMeasured("not this one")

    def speaks_python(self, _):
        return {"value": object()}

    def segfaults(self, _):
        ctypes.string_at(0)

    def hangs(self, _):
        time.sleep(1000)

    def leaves(self, _):
        os._exit(7)

    def starts_others(self, _):
        """As an engine: in a session of its own."""
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        self._leash = Leash(other.pid)
        return {"pid": other.pid}
