"""Addresses of sockets: which are any, which leave the host, and which are taken."""

import socket
from pathlib import Path

import pytest

from vllm_specrollout.cluster import endpoint
from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.0.0.53"])
def test_loopback_stays_on_the_host(host: str) -> None:
    assert endpoint.parse(f"tcp://{host}:5570", serve=True).is_local


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "node7", "localhost.evil.org", "[::]", "[fe80::1]", "127.1"]
)
def test_everything_else_leaves_it(host: str) -> None:
    assert not endpoint.parse(f"tcp://{host}:5570", serve=True).is_local


def test_localhost_is_not_looked_up() -> None:
    assert endpoint.parse("tcp://localhost:5570", serve=False).address == "tcp://127.0.0.1:5570"


def test_an_ipv6_address_is_one() -> None:
    assert endpoint.parse("tcp://[::1]:5570", serve=True).is_ipv6
    assert not endpoint.parse("tcp://127.0.0.1:5570", serve=True).is_ipv6


@pytest.mark.parametrize(
    "address",
    [
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5570",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:x",
        "tcp://10.0.0.1;127.0.0.1:5570",  # ZeroMQ's way to name a source address
        "tcp://::1:5570",
        "tcp://host:5570/path",
        "tcp://a b:5570",
        "udp://host:5570",
        "tcp://host:5570\n",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        endpoint.parse(address, serve=True)


@pytest.mark.parametrize("address", ["tcp://*:5570", "tcp://127.0.0.1:0"])
def test_only_the_end_that_serves_may_leave_a_part_open(address: str) -> None:
    endpoint.parse(address, serve=True)
    with pytest.raises(ConfigError, match="names no end to connect to"):
        endpoint.parse(address, serve=False)


@pytest.mark.parametrize("path", ["", "*", "@name", "/tmp/a\0b", "/" + "x" * 107])
def test_a_path_without_a_file_s_permissions_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is no path for a socket"):
        endpoint.parse(f"ipc://{path}", serve=True)


def test_a_path_is_local() -> None:
    found = endpoint.parse("ipc:///tmp/x.sock", serve=True)
    assert (found.is_local, found.path, found.address) == (True, Path("/tmp/x.sock"), "ipc:///tmp/x.sock")


def test_a_free_path_and_an_abandoned_socket_may_be_claimed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    endpoint.claim(path)
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    endpoint.claim(path)
    assert path.is_socket(), "left as it is: ZeroMQ puts its own there"


def test_a_socket_that_somebody_listens_at_may_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with pytest.raises(MailboxError, match="another process listens"):
            endpoint.claim(path)


def test_a_file_and_a_missing_folder_may_not(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="is no socket"):
        endpoint.claim(path)
    assert path.read_text() == "kept"
    with pytest.raises(ConfigError, match="there is no directory"):
        endpoint.claim(tmp_path / "nowhere" / "socket")
