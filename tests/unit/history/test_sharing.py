"""Several processes with one directory: each has a file of its own, and none reads what nobody wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.history import sharing
from tests.unit.history.stored import answers_of
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history import upkeep
from vllm_specrollout.history.database import files
from vllm_specrollout.history.store import HistoryStore

ENGINES, ROUNDS = 4, 12
PATIENCE_S = 120  # no test waits so long unless it fails


def test_processes_that_share_a_directory_write_files_of_their_own_and_read_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.history.sharing", str(tmp_path)]
    engines = [
        subprocess.Popen([*command, str(engine), str(ROUNDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for engine in range(ENGINES)
    ]
    try:
        names = [engine.stdout.readline().strip() for engine in engines]
        assert sorted(names) == [f"answers-{number:04d}.history" for number in range(ENGINES)]
        # all are open; from here on they write, begin epochs, drop, close and open again at the same time
        for engine in engines:
            engine.stdin.write("\n")
            engine.stdin.flush()
        found = [json.loads(engine.communicate(timeout=PATIENCE_S)[0]) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert [one["wrong"] for one in found] == [[]] * ENGINES and all(engine.returncode == 0 for engine in engines)
    assert all(one["written"] > 100 for one in found) and sum(one["seen"] for one in found) > 100
    reports = [upkeep.inspect(path) for path in files(tmp_path)]
    assert sum(report.answers for report in reports) > 0
    assert all(report.damaged == 0 and report.integrity == "ok" for report in reports)
    assert all(sharing.is_right(answer) for path in files(tmp_path) for answer in answers_of(path))
    store = HistoryStore(HistoryConfig(dir=str(tmp_path)))
    assert store.stats().damaged == 0
    store.close()
