"""Processes in groups of their own end with the process that holds them, and with nothing else."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.runner.leash import Leash

ROOT = Path(__file__).resolve().parents[4]
HOLDER = """
import subprocess, sys, time
from bench.runner.leash import Leash
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
leash = Leash(other.pid)
print(other.pid, flush=True)
time.sleep(1000)
"""


def is_gone(pid, within_s=5.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            # a zombie is gone: it waits to be asked for, which nobody may do
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_group_ends_when_its_holder_is_killed(number):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())
    holder.send_signal(number)
    holder.wait()
    assert is_gone(pid)


def test_a_group_that_was_let_go_lives_on():
    other = sleeper()
    try:
        Leash(other.pid).release()
        assert not is_gone(other.pid, within_s=0.5)
    finally:
        other.kill()
        other.wait()


def test_a_leash_can_end_its_group_and_may_be_ended_twice():
    other = sleeper()
    leash = Leash(other.pid)
    leash.end()
    leash.end()
    assert other.wait(5) == -signal.SIGKILL
