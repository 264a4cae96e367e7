"""What is allowed after which failure, what the next start learns, and that no part runs for ever."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm_specrollout.observe.self_check import (
    ATTENTION,
    CHAIN_GRAPHS,
    CHAINS,
    COMMIT,
    CRASH,
    PARTS,
    TREE_GRAPHS,
    TREES,
    VERIFY,
    Allowed,
    HungError,
    Record,
    allowed,
    deadline,
)
from vllm_specrollout.types import DraftMode

ORDER = (DraftMode.OFF, DraftMode.CHAIN, DraftMode.TREE)


@pytest.mark.parametrize(
    "failed, rule",
    [
        ([], Allowed(DraftMode.TREE)),
        *(([part], Allowed(DraftMode.CHAIN)) for part in (ATTENTION, COMMIT, TREES, TREE_GRAPHS)),
        ([VERIFY], Allowed(DraftMode.CHAIN, has_kernel=False)),
        ([CHAIN_GRAPHS], Allowed(DraftMode.TREE, has_graphs=False)),
        ([CRASH], Allowed(DraftMode.CHAIN, has_graphs=False, has_kernel=False)),
        ([CHAINS], Allowed(DraftMode.OFF, has_graphs=False, has_kernel=False)),
    ],
)
def test_what_failed_takes_away_what_rests_on_it(failed: list[str], rule: Allowed) -> None:
    assert allowed(dict.fromkeys(failed, "wrong")) == rule


def test_one_failure_more_never_allows_more() -> None:
    for few in itertools.chain.from_iterable(itertools.combinations((*PARTS, CRASH), n) for n in range(4)):
        before = allowed(dict.fromkeys(few, ""))
        for more in (*PARTS, CRASH):
            after = allowed(dict.fromkeys((*few, more), ""))
            assert ORDER.index(after.shape) <= ORDER.index(before.shape)
            assert after.has_graphs <= before.has_graphs and after.has_kernel <= before.has_kernel


def test_what_passed_is_known_to_the_next_start_until_it_fails(tmp_path: Path) -> None:
    first, other = Record("key", tmp_path), Record("another", tmp_path)
    first.begin(VERIFY)
    first.end({})
    assert Record("key", tmp_path).has_passed and not other.has_passed
    first.begin(VERIFY)
    first.end({VERIFY: "wrong"})
    assert not Record("key", tmp_path).has_passed and not list(tmp_path.iterdir())


def _dies_in(folder: Path, part: str) -> None:
    Record("key", folder).begin(part)
    os._exit(9)


def test_a_process_that_dies_in_a_part_is_found_by_the_next_start(tmp_path: Path) -> None:
    dying = multiprocessing.get_context("spawn").Process(target=_dies_in, args=(tmp_path, TREES))
    dying.start()
    dying.join()
    assert "died in the part `trees`" in Record("key", tmp_path).crash()
    assert not Record("another", tmp_path).crash()
    Record("key", tmp_path).clear()
    assert not Record("key", tmp_path).crash()


def test_engines_that_check_themselves_at_the_same_time_are_no_crash(tmp_path: Path) -> None:
    Record("key", tmp_path).begin(TREES)  # by this process, which lives
    assert not Record("key", tmp_path).crash()


def test_another_hosts_file_is_a_crash_once_no_check_could_still_run(tmp_path: Path) -> None:
    path = tmp_path / "key.elsewhere.7.pending"
    path.write_text(json.dumps({"part": TREES, "pid": 7, "began": 1.0, "host": socket.gethostname() + "-not"}))
    assert not Record("key", tmp_path).crash()
    long_ago = time.time() - 86_400
    os.utime(path, (long_ago, long_ago))
    assert Record("key", tmp_path).crash()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"part": 1}', '{"pid": "x", "part": "trees", "host": 3}'])
def test_a_damaged_file_ends_no_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.elsewhere.7.pending").write_text(text)
    assert not Record("key", tmp_path).crash()


def test_a_folder_that_cannot_be_written_costs_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = Record("key", tmp_path / "file")
    made.begin(VERIFY)
    made.end({})
    assert not made.has_passed and not made.crash()


def test_a_part_that_hangs_is_left() -> None:
    with pytest.raises(HungError), deadline("commit", 0.1):
        while True:
            time.sleep(0.01)


def test_a_part_that_cannot_be_left_ends_the_process() -> None:
    ended, heeded = threading.Event(), 0
    with deadline("commit", 0.05, 0.05, ended.set):
        while not ended.is_set():
            try:
                time.sleep(0.01)
            except HungError:
                heeded += 1  # as a kernel would, that never comes back
    assert heeded == 1


def test_a_part_that_ends_in_time_is_left_alone() -> None:
    before = threading.active_count()
    for _ in range(20):
        with deadline("commit", 60.0, 60.0, pytest.fail):
            pass
    assert threading.active_count() == before


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_that_was_checked_can_be_profiled(is_late: bool) -> None:
    """Profilers and debuggers meet whatever the exception that is thrown at a part leaves behind in the interpreter."""
    code = f"""
import sys, time
from vllm_specrollout.observe.self_check import HungError, deadline
try:
    with deadline("commit", 0.01 if {is_late} else 60.0):
        end = time.monotonic() + ({is_late} and 30.0)
        while time.monotonic() < end:
            pass
    assert not {is_late}
except HungError:
    assert {is_late}
sys.setprofile(lambda *event: None)
print(sum(range(3)), sorted([2, 1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3 [1, 2]\n"
