"""The dry walk of the first hour on a GPU, ended on its way: no row is lost, and nobody is left behind.

Every start is the very command that a user runs. The walk is the shortest that has all steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench.gpu.machine import MARK
from bench.gpu.parts import FIRST_HOUR

pytestmark = pytest.mark.timeout(1800)

pytest.importorskip("triton", reason="kernels are interpreted")

ROOT = Path(__file__).resolve().parents[2]
# what is waited for, how everything is then ended, and whether a row must be under way
CUTS = [
    ("checks, what is installed: done", signal.SIGKILL, True),
    ("eager, trees: starting", signal.SIGTERM, False),
    ("kernels, attention 0.5B, 1 x 64, 0 nodes: right", signal.SIGTERM, True),
    ("speed: starting", signal.SIGKILL, False),
]


class Hour:
    """Starts in one folder."""

    def __init__(self, folder: Path) -> None:
        self.out, self.work = folder / "out", folder / "work"

    def start(self) -> subprocess.Popen[str]:
        command = [ROOT / "bench/gpu/first_hour.sh", "--dry", "--arms", "tree", "--deadline", "0"]
        return subprocess.Popen(
            [*map(str, command), "--out", str(self.out), "--work", str(self.work)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def rows(self) -> dict[str, dict]:
        body = json.loads((self.out / "first-hour.json").read_text())
        return {row["key"]: row for row in body["rows"]}

    def done(self) -> dict[str, dict]:
        return {key: row for key, row in self.rows().items() if row["state"] == "done"}

    def wait_until_a_row_is_under_way(self) -> None:
        end = time.monotonic() + 20
        while all(row["state"] != "begun" for row in self.rows().values()):
            assert time.monotonic() < end
            time.sleep(0.01)

    def alive(self) -> list[str]:
        """Command lines of the walk's processes, whatever their group."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.work}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def wait_until_nobody_is_left(self) -> None:
        end = time.monotonic() + 120
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.alive() == []


@pytest.mark.nightly
def test_a_walk_that_is_ended_on_its_way_loses_no_row_and_ends_like_any_other(tmp_path: Path) -> None:
    hour, before = Hour(tmp_path), {}
    for sign, number, is_in_a_row in CUTS:
        process = hour.start()
        heard = []
        for line in process.stdout:
            heard.append(line)
            if sign in line:
                break
        assert heard and sign in heard[-1], f"never came to {sign!r}: {''.join(heard)[-3000:]}"
        if is_in_a_row:
            hour.wait_until_a_row_is_under_way()
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        rest = process.communicate()[0]
        # one that can be answered is: with the tables of what there is
        assert (process.returncode == 128 + number and "Steps (dry)" in rest) or number == signal.SIGKILL
        hour.wait_until_nobody_is_left()
        now = hour.done()
        assert {key: now.get(key) for key in before} == before, "a row was lost, or measured twice"
        before = now
    process = hour.start()
    said = process.communicate()[0]
    assert process.returncode == 0, said[-3000:]
    hour.wait_until_nobody_is_left()
    rows = hour.rows()
    assert {key: rows[key] for key in before} == before
    assert {row["state"] for row in rows.values()} == {"done"}
    assert {row["step"] for row in rows.values()} == set(FIRST_HOUR)
    assert not [row["name"] for row in rows.values() if row["is_right"] is False]
    # what was under way when it was cut was begun once more
    assert sorted(row["attempts"] for row in rows.values()) == [1] * (len(rows) - 2) + [2, 2]
    again = hour.start()
    assert "starting" not in again.communicate()[0] and again.returncode == 0
    assert hour.rows() == rows
