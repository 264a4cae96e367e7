"""Faults come as planned, do what they are called, and are undone."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.runner.server import DRAFTER, disk_bytes, family, holdings
from bench.soak.faults import AWAY, FULL, KILL, STALL, inflict, plan

KINDS = (FULL, AWAY, STALL, KILL)
# it writes a byte whenever it is sent a line, and says whether that went
_WRITER = """
import sys
with open(sys.argv[1], "ab", 0) as file:
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            file.write(b"x")
            print("written", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
"""


@pytest.fixture
def begun(tmp_path):
    """Begin a process of the title of vLLM's worker, or of a drafter: (it, a function that has it write a byte)."""
    processes = []

    def begin(title):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "file"), title]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"

        def write():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        return process, write

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def inflicted(kind, history=Path("nowhere")):
    return inflict(kind, os.getpid(), history)


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_seed_is_a_plan_and_faults_do_not_overlap():
    one = plan(5, 1800.0, KINDS)
    assert one == plan(5, 1800.0, KINDS) != plan(6, 1800.0, KINDS)
    assert all(a.end_s < b.begin_s for a, b in zip(one, one[1:], strict=False))
    assert one[0].begin_s >= 30.0 and one[-1].end_s <= 1770.0
    counts = Counter(fault.kind for fault in one)
    assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1


def test_a_short_run_and_a_run_without_kinds_have_no_faults():
    assert plan(5, 40.0, KINDS) == plan(5, 1800.0, ()) == []


def test_on_a_full_disk_no_write_goes_through_and_afterwards_all_do(begun):
    _, write = begun("VLLM::Worker")
    assert write() == "written"
    with inflicted(FULL):
        assert write() == "OSError"
    assert write() == "written"


def test_a_folder_that_is_away_is_a_file_and_comes_back_with_what_it_held(tmp_path):
    history = tmp_path / "kept" / "history"
    history.mkdir(parents=True)
    (history / "answers").write_bytes(b"12345")
    with inflicted(AWAY, history):
        assert history.is_file()
        # wherever it is, it takes its place on the disk
        assert disk_bytes(history.parent) == 5
    assert (history / "answers").read_bytes() == b"12345"
    assert os.listdir(history.parent) == ["history"]


def test_a_worker_that_is_stalled_stands_still_and_goes_on(begun):
    process, write = begun("VLLM::Worker")
    with inflicted(STALL):
        end = time.monotonic() + 30.0
        while state(process.pid) != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert state(process.pid) == "T"
    assert write() == "written"


def test_of_all_processes_the_drafter_alone_is_killed(begun):
    drafter, _ = begun("vllm_specrollout.worker.drafter_process")
    worker, write = begun("VLLM::Worker")
    with inflicted(KILL):
        assert drafter.wait(30.0) < 0
    assert worker.poll() is None and write() == "written"


def test_what_processes_hold_is_told_by_what_they_are_for(begun):
    begin = holdings(os.getpid())
    process, _ = begun("VLLM::Worker")
    begun("vllm_specrollout.worker.drafter_process")
    found = holdings(os.getpid())
    assert process.pid in [one.pid for _, one in family(os.getpid())]
    assert found["worker"].processes == found[DRAFTER].processes == 1
    assert found["worker"].rss_mib > 1.0
    # its three outputs and the file that it writes, and what this process handed down
    assert found["worker"].files >= 4
    assert set(found) - set(begin) <= {"worker", DRAFTER}
