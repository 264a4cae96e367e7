"""A mailbox that nobody closed holds nobody up."""

from __future__ import annotations

import subprocess
import sys

_FORGOTTEN = """
import gc
from vllm_specrollout.cluster.socket_mailbox import SocketMailbox
def forget(*ends):
    for end in ends:
        end.itself = end  # only the garbage collector finds it
for i in range(20):
    ends = (False, "tcp://127.0.0.1:9"), (True, "tcp://127.0.0.1:0")
    forget(*(SocketMailbox(address, serve=serve) for serve, address in ends))
gc.collect()
print("goes on")
"""


def test_one_that_is_forgotten_in_a_cycle_does_not_stop_the_process() -> None:
    ran = subprocess.run([sys.executable, "-c", _FORGOTTEN], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.returncode) == ("goes on\n", 0), ran.stderr
