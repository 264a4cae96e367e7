"""Processes of ours end with whoever began them, also where they hang."""

import os
import signal
import subprocess
import sys
import time

PATIENCE_S = 20.0
BEGUN = """
import os, signal, subprocess, sys
code = "import os, signal, sys; from vllm_specrollout.worker.ending import end_with; end_with(int(sys.argv[1]));"
code += "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], start_new_session=True)
os.close(1)
signal.pause()
"""


def is_there(pid: int) -> bool:
    """Nobody may be there to take note of its end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_hangs_ends_with_the_one_that_began_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BEGUN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = parent.stdout.readline()
        parent.send_signal(signal.SIGKILL)
        pid = int(said)
        end = time.monotonic() + PATIENCE_S
        while is_there(pid) and time.monotonic() < end:
            time.sleep(0.01)
        left = is_there(pid)
        if left:
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_process_whose_parent_went_before_it_was_bound_ends_in_order() -> None:
    code = "from vllm_specrollout.worker.ending import end_with; end_with(1 << 30); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == ""
