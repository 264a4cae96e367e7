"""The dry walk of the first hour on a GPU, killed on its way: nothing is lost or measured twice, nobody is left behind.

Both starts are the very command that a user runs. The walk is the shortest that has all steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from bench.gpu.commands import STEPS
from bench.gpu.hour import FILE

pytestmark = [pytest.mark.timeout(1800), pytest.mark.nightly]

pytest.importorskip("triton", reason="kernels are interpreted")

ROOT = Path(__file__).resolve().parents[2]


class Hour:
    """Starts in one folder."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self._environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}

    def start(self) -> subprocess.Popen[str]:
        command = [ROOT / "bench/gpu/first_hour.sh", "--dry", "--arms", "tree", "--deadline", "0"]
        return subprocess.Popen(
            [*map(str, command), "--out", str(self.out)],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def runs(self) -> dict[str, dict]:
        return {one["key"]: one for one in json.loads((self.out / FILE).read_text())["runs"]}

    def alive(self) -> list[int]:
        """The walk's processes, whatever their group: its kernels lie in a folder of its own."""
        found = []
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("TRITON_CACHE_DIR") == self._environment["TRITON_CACHE_DIR"]:
                found.append(process.pid)
        return found

    def wait_until_nobody_is_left(self) -> None:
        end = time.monotonic() + 120
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.alive() == []


def test_a_walk_that_is_killed_on_its_way_goes_on_where_it_was(tmp_path: Path) -> None:
    hour = Hour(tmp_path)
    process = hour.start()
    heard = []
    for line in process.stdout:
        heard.append(line)
        if "speed, tree, 2x64:5: specrollout" in line:
            break
    else:
        pytest.fail(f"never came to an engine: {''.join(heard)[-3000:]}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    hour.wait_until_nobody_is_left()
    before = hour.runs()
    process = hour.start()
    said = process.communicate()[0]
    assert process.returncode == 0, said[-3000:]
    hour.wait_until_nobody_is_left()
    runs = hour.runs()
    assert {one["state"] for one in runs.values()} == {"done"}
    # of trees nothing is strict
    assert {one["step"] for one in runs.values()} == set(STEPS) - {"strict"}
    assert all(runs[key] == one for key, one in before.items() if one["state"] == "done")
    # what was under way when it was killed was begun once more
    assert sorted(one["attempts"] for one in runs.values()) == [1] * (len(runs) - 1) + [2]
    rows = [row for one in runs.values() for row in one["report"].get("rows", ())]
    assert not [row["name"] for row in rows if row.get("passed") is False]
    assert any(row.get("speedup") for row in rows) and any(row.get("measured") for row in rows)
    traces = [trace for one in runs.values() for trace in one["report"].get("traces", ())]
    assert traces and all(step["busy_ms"] <= step["span_ms"] for trace in traces for step in trace["steps"])
