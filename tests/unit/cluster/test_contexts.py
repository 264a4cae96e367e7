"""A mailbox that nobody closed holds nobody up."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORGOTTEN = """
import gc
from vllm_specrollout.cluster.socket_mailbox import SocketMailbox
from vllm_specrollout.cluster.group.channel import ZmqHub, ZmqLine
def forget(*ends):
    for end in ends:
        end.itself = end  # only the garbage collector finds it
for i in range(20):
    forget({ends})
gc.collect()
print("goes on")
"""


@pytest.mark.parametrize(
    "ends",
    [
        "ZmqHub(f'ipc://{folder}/{{i}}'), ZmqLine(f'ipc://{folder}/{{i}}', 'w', may_lose=True)",
        "SocketMailbox('tcp://127.0.0.1:0', serve=True), SocketMailbox('tcp://127.0.0.1:9', serve=False)",
    ],
    ids=["channel", "mailbox"],
)
def test_one_that_is_forgotten_in_a_cycle_does_not_stop_the_process(ends: str, tmp_path) -> None:
    source = _FORGOTTEN.replace("{ends}", ends.replace("{folder}", str(tmp_path)).replace("{{i}}", "{i}"))
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout, ran.returncode) == ("goes on\n", 0), ran.stderr
