"""From an address to a mailbox."""

import os
from pathlib import Path

import pytest

from tests.unit.cluster.builders import CLOSE
from vllm_specrollout.cluster.address import open_mailbox
from vllm_specrollout.cluster.ring import RingMailbox
from vllm_specrollout.cluster.socket_mailbox import SocketMailbox
from vllm_specrollout.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "cls"),
    [("shm://{name}", RingMailbox), ("ipc://{folder}/socket", SocketMailbox), ("tcp://127.0.0.1:0", SocketMailbox)],
)
def test_an_address_names_its_transport(address: str, cls: type, tmp_path: Path) -> None:
    ours = open_mailbox(address.format(name=f"test-{os.getpid()}", folder=tmp_path), serve=True)
    theirs = open_mailbox(ours.address, serve=False)
    assert isinstance(ours, cls) and isinstance(theirs, cls)
    assert theirs.send(CLOSE) and ours.wait(10.0) and ours.receive() == [CLOSE]
    theirs.close()
    ours.close()


@pytest.mark.parametrize(
    "address", ["", "shm", "shm:name", "shm//name", "tcp:127.0.0.1:5", "pgm://x", "inproc://x", "://"]
)
def test_an_unknown_address_is_refused_with_the_ones_there_are(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_mailbox(address, serve=True)
    assert caught.value.cause == f"`{address}` is no address of a mailbox"
    assert caught.value.hint == "write shm://NAME, ipc://PATH or tcp://HOST:PORT"


def test_shared_memory_takes_no_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no keys"):
        open_mailbox("shm://name", serve=True, keys=tmp_path)
