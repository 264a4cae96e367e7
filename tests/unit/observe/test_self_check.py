import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from vllm_specrollout.observe.self_check import (
    ATTENTION,
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
        ([CRASH], Allowed(DraftMode.CHAIN, has_kernel=False)),
        ([CHAINS], Allowed(DraftMode.OFF, has_kernel=False)),
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
            assert after.has_kernel <= before.has_kernel


def test_what_passed_is_known_to_the_next_start_until_it_fails(tmp_path: Path) -> None:
    first, other = Record("key", tmp_path), Record("another", tmp_path)
    first.begin(VERIFY)
    first.end({})
    assert Record("key", tmp_path).has_passed and not other.has_passed
    first.begin(VERIFY)
    first.end({VERIFY: "wrong"})
    assert not Record("key", tmp_path).has_passed and not list(tmp_path.iterdir())


def _dies(folder: Path, how: str, start: str = "") -> None:
    """In the part `trees`: by a signal, or by a hang."""
    made = Record("key", folder)
    made.join(start or made.start)
    made.begin(VERIFY)
    made.begin(TREES)
    if how == "hangs":
        # late enough for what hangs to have begun
        with deadline(TREES, 0.2, 0.0, end=lambda: (made.fault("it hangs"), os._exit(70))):  # type: ignore[arg-type]
            while True:
                with suppress(HungError):
                    time.sleep(0.01)
    os.kill(os.getpid(), signal.Signals[how])


def died(folder: Path, how: str, *rest: str) -> None:
    dying = multiprocessing.get_context("fork").Process(target=_dies, args=(folder, how, *rest))
    dying.start()
    dying.join()
    assert dying.exitcode


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGABRT", "SIGBUS", "hangs"])
def test_a_fault_that_ended_two_starts_is_a_crash_until_all_is_checked_anew(tmp_path: Path, how: str) -> None:
    died(tmp_path, how)
    assert not Record("key", tmp_path).crash(), "it may have been of another host: it is checked once more"
    died(tmp_path, how)
    found = Record("key", tmp_path).crash()
    said = {"SIGSEGV": "Segmentation fault", "SIGABRT": "Aborted", "SIGBUS": "Bus error", "hangs": "it hangs"}[how]
    assert "2 starts died, one in the part `trees` of" in found and said in found
    assert not Record("another", tmp_path).crash()
    assert not Record("key", tmp_path, "another").crash(), "a folder that hosts share, one of which is broken"
    Record("key", tmp_path).clear()
    assert not Record("key", tmp_path).crash()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_starts_that_were_killed_in_their_check_are_no_crash_and_leave_nothing(tmp_path: Path, how: str) -> None:
    for _ in range(3):
        died(tmp_path, how)
        assert not Record("key", tmp_path).crash() and not list(tmp_path.iterdir())


def test_ranks_of_one_start_that_die_together_are_one_crash(tmp_path: Path) -> None:
    for _ in range(4):
        died(tmp_path, "SIGSEGV", "one")
    assert not Record("key", tmp_path).crash()
    died(tmp_path, "SIGSEGV", "two")
    assert Record("key", tmp_path).crash()


def test_a_start_that_passes_takes_back_the_fault_of_another(tmp_path: Path) -> None:
    died(tmp_path, "SIGSEGV")
    passing = Record("key", tmp_path)
    passing.begin(TREES)
    passing.end({})
    assert passing.has_passed and [path.name for path in tmp_path.iterdir()] == ["key.passed"]
    died(tmp_path, "SIGSEGV")
    assert not Record("key", tmp_path).crash()


def test_checks_that_run_now_are_no_crash_whoever_runs_them(tmp_path: Path) -> None:
    """The lock says it: neither a process's number nor a host's name, which containers share or hide."""
    running = [Record("key", tmp_path) for _ in range(3)]
    for each in running:
        each.begin(TREES)
        each.fault("as if")
    assert not Record("key", tmp_path).crash() and len(list(tmp_path.iterdir())) == 3
    for each in running:
        each.forget()
    assert not list(tmp_path.iterdir())


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("had_one", [False, True])
def test_faults_are_written_as_before_once_the_check_is_over(tmp_path: Path, had_one: bool) -> None:
    code = f"""
import faulthandler, pathlib
from vllm_specrollout.observe.self_check import Record
{"faulthandler.enable()" if had_one else ""}
made = Record("key", pathlib.Path({str(tmp_path)!r}))
made.begin("trees")
assert faulthandler.is_enabled()
made.end({{}})
assert faulthandler.is_enabled() is {had_one}
faulthandler._sigsegv()
"""
    done = _python(code)
    assert done.returncode < 0 and ("Segmentation fault" in done.stderr) is had_one, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key.passed"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"part": "trees", "pid": 3}'])
def test_a_damaged_file_ends_no_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key.any.elsewhere.7.pending").write_bytes(content)
    (tmp_path / "key.any.elsewhere.8.pending").mkdir()
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
    done = _python(code)
    assert done.stdout == "3 [1, 2]\n", done.stderr
