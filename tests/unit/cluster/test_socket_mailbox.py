"""Messages over live ZeroMQ sockets: both transports, full queues, hostile peers, wrong keys."""

import logging
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.unit.cluster.builders import CLOSE, DRAFTS, HELLO, ONE_OF_EACH, VERDICT, is_same, sealed
from vllm_specrollout.cluster import keys
from vllm_specrollout.cluster.codec import MAX_MESSAGE, encode
from vllm_specrollout.cluster.mailbox import Mailbox, MailboxError
from vllm_specrollout.cluster.messages import Close, Message
from vllm_specrollout.cluster.socket_mailbox import SocketMailbox
from vllm_specrollout.errors import ConfigError

PATIENCE_S = 20.0
SILENCE_S = 0.5
"""How long nothing may come where nothing is to come."""

Opener = Callable[..., SocketMailbox]


@pytest.fixture
def opener() -> Iterator[Opener]:
    """Opens mailboxes, and closes them behind the test."""
    opened = []

    def open_one(address: str = "tcp://127.0.0.1:0", **arguments) -> SocketMailbox:
        opened.append(SocketMailbox(address, **arguments))
        return opened[-1]

    yield open_one
    for mailbox in reversed(opened):
        mailbox.close()


@pytest.fixture(params=["tcp", "ipc"])
def pair(request: pytest.FixtureRequest, opener: Opener, tmp_path: Path) -> tuple[Mailbox, Mailbox]:
    served = opener("tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/socket", serve=True)
    return served, opener(served.address, serve=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.write(tmp_path / "keys")
    return tmp_path / "keys"


def gather(mailbox: Mailbox, count: int) -> list[Message]:
    """The next `count` messages, or as many as come."""
    found: list[Message] = []
    end = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < end:
        mailbox.wait(0.1)
        found += mailbox.receive(count - len(found))
    return found


def greet(client: Mailbox, served: Mailbox) -> None:
    """Let the end that serves know the other one."""
    assert client.send(HELLO) and is_same(gather(served, 1)[0], HELLO)


def test_messages_go_both_ways(pair: tuple[Mailbox, Mailbox]) -> None:
    served, client = pair
    for one, other in ((client, served), (served, client)):
        assert all(one.send(message) for message in ONE_OF_EACH)
        found = gather(other, len(ONE_OF_EACH))
        assert len(found) == len(ONE_OF_EACH) and all(map(is_same, found, ONE_OF_EACH))
        assert other.receive() == [] and not other.wait(0.0)
        assert one.stats.sent == other.stats.received == len(ONE_OF_EACH)
        assert other.stats.sessions == 1


def test_the_end_that_serves_drops_and_counts_while_nobody_is_there(opener: Opener) -> None:
    served = opener(serve=True)
    assert not served.send(CLOSE)
    client = opener(served.address, serve=False)
    greet(client, served)
    assert served.send(Close(2)) and gather(client, 1) == [Close(2)]
    assert (served.stats.dropped_full, client.stats.missing) == (1, 1)


def test_a_client_may_come_before_the_end_that_serves(opener: Opener, tmp_path: Path) -> None:
    client = opener(f"ipc://{tmp_path}/socket", serve=False)
    assert client.send(CLOSE)
    assert gather(opener(f"ipc://{tmp_path}/socket", serve=True), 1) == [CLOSE]


@pytest.mark.parametrize("is_full", ["served", "client"])
def test_a_full_queue_drops_and_counts(pair: tuple[Mailbox, Mailbox], is_full: str) -> None:
    served, client = pair
    greet(client, served)
    one, other = pair if is_full == "served" else pair[::-1]
    bulk = replace(VERDICT, num_tokens=4096, token_ids=np.zeros(4096, np.int32))
    sent = 0
    while one.send(bulk):
        sent += 1
        assert sent < 20_000, "the queue grows without bound"
    assert one.stats.dropped_full == 1
    found = gather(other, sent)
    assert len(found) == sent
    # now that it is empty, messages get through again, and what is missing is noticed
    end = time.monotonic() + PATIENCE_S
    while not one.send(CLOSE) and time.monotonic() < end:
        time.sleep(0.01)
    assert gather(other, 1) == [CLOSE]
    assert other.stats.missing == one.stats.dropped_full


def test_an_end_that_comes_back_is_answered(opener: Opener) -> None:
    served = opener(serve=True)
    former = opener(served.address, serve=False)
    greet(former, served)
    former.close()
    for number in range(5):
        served.send(Close(number))  # to nobody
    latter = opener(served.address, serve=False)
    greet(latter, served)
    assert served.send(Close(9)) and gather(latter, 1) == [Close(9)]
    assert served.stats.sessions == 2


def test_of_two_clients_the_later_one_is_answered(opener: Opener) -> None:
    served = opener(serve=True)
    former, latter = opener(served.address, serve=False), opener(served.address, serve=False)
    greet(former, served)
    greet(latter, served)
    former.send(CLOSE)
    assert served.wait(PATIENCE_S) and served.receive() == []
    assert served.stats.doubled == 1
    assert served.send(Close(3)) and gather(latter, 1) == [Close(3)]
    assert former.receive() == []


@pytest.fixture
def raw() -> Iterator[zmq.Socket]:
    """A peer that speaks ZeroMQ, and says what it likes."""
    with zmq.Context() as context:
        made = context.socket(zmq.DEALER)
        made.linger = 0
        yield made
        made.close()


HOSTILE = {
    "nothing": [[b""]],
    "noise": [[bytes(range(256))], [b"\xff" * 10_000]],
    "cut off": [[encode(DRAFTS, 1, 0)[:-1]]],
    "several parts": [[b"", encode(CLOSE, 1, 0)], [encode(CLOSE, 1, 0)] * 50],
    "another version": [[sealed(4, bytes(8), version=9)]],
    "a huge count": [[sealed(5, bytes(16) + struct.pack("<I", 2**32 - 1))]],
}


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_messages_are_refused_logged_and_harmless(
    title: str, opener: Opener, raw: zmq.Socket, caplog: pytest.LogCaptureFixture
) -> None:
    served = opener(serve=True)
    raw.connect(served.address)
    for parts in HOSTILE[title] * 20:
        raw.send_multipart(parts)
    end = time.monotonic() + PATIENCE_S
    while served.stats.malformed < 20 * len(HOSTILE[title]) and time.monotonic() < end:
        served.wait(0.1)
        assert served.receive() == []
    assert served.stats.malformed == 20 * len(HOSTILE[title])
    assert served.stats.received == served.stats.sessions == 0
    assert 1 <= len(caplog.records) <= len(HOSTILE[title])
    greet(opener(served.address, serve=False), served)


def test_a_replayed_message_gets_through_once(opener: Opener, raw: zmq.Socket) -> None:
    served = opener(serve=True)
    raw.connect(served.address)
    for _ in range(10):
        raw.send(encode(CLOSE, 5, 7))
    raw.send(encode(Close(8), 5, 8))
    assert gather(served, 2) == [CLOSE, Close(8)]
    assert (served.stats.doubled, served.stats.missing) == (9, 7)


def test_a_longer_message_than_any_ends_its_connection_unread(opener: Opener, raw: zmq.Socket) -> None:
    served = opener(serve=True)
    raw.connect(served.address)
    raw.send(bytes(MAX_MESSAGE + 4096))
    assert not served.wait(SILENCE_S)
    greet(opener(served.address, serve=False), served)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(1000), b"\xff\0\0\0\0\0\0\0\1\x7f" * 9]
)
def test_bytes_that_are_not_zeromq_s_are_harmless(noise: bytes, opener: Opener) -> None:
    served = opener(serve=True)
    port = int(served.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(noise)
        assert not served.wait(SILENCE_S)
        greet(opener(served.address, serve=False), served)
    assert served.stats.malformed == 0


def test_with_keys_messages_go_both_ways(opener: Opener, folder: Path) -> None:
    served = opener(serve=True, key_folder=folder)
    client = opener(served.address, serve=False, key_folder=folder)
    greet(client, served)
    assert served.send(CLOSE) and gather(client, 1) == [CLOSE]
    assert served.stats.refused == 0


def test_the_longest_message_passes_encrypted(opener: Opener, folder: Path) -> None:
    served = opener(serve=True, key_folder=folder)
    client = opener(served.address, serve=False, key_folder=folder)
    noise = b"\0" * (MAX_MESSAGE - len(encode(CLOSE, 1, 0)))
    client._socket.send(encode(CLOSE, 1, 0) + noise)
    client.send(CLOSE)
    assert gather(served, 1) == [CLOSE]
    assert served.stats.malformed == 1  # it came, whole, and was refused for its content


def test_an_unlisted_key_gets_nothing_through(
    opener: Opener, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.write(tmp_path / "foreign")
    # it knows whom it speaks to, and is not known itself
    (tmp_path / "foreign" / "server.key").write_bytes((folder / "server.key").read_bytes())
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        served = opener(serve=True, key_folder=folder)
        stranger = opener(served.address, serve=False, key_folder=tmp_path / "foreign")
        for _ in range(20):
            stranger.send(HELLO)
        assert not served.wait(SILENCE_S) and served.receive() == []
    assert served.stats.refused >= 1 and served.stats.bytes == 0
    assert caplog.text.count("unlisted key") == 1
    greet(opener(served.address, serve=False, key_folder=folder), served)
    assert stranger.receive() == []


def test_a_client_without_keys_gets_nothing_through(opener: Opener, folder: Path) -> None:
    served = opener(serve=True, key_folder=folder)
    stranger = opener(served.address, serve=False)
    stranger.send(HELLO)
    assert not served.wait(SILENCE_S)
    greet(opener(served.address, serve=False, key_folder=folder), served)
    assert stranger.receive() == []


def test_a_client_does_not_speak_to_a_server_with_another_key(opener: Opener, folder: Path, tmp_path: Path) -> None:
    keys.write(tmp_path / "foreign")
    (tmp_path / "foreign" / "client.key").write_bytes((folder / "client.key").read_bytes())
    impostor = opener(serve=True, key_folder=tmp_path / "foreign")
    opener(impostor.address, serve=False, key_folder=folder).send(HELLO)
    assert not impostor.wait(SILENCE_S)


def test_a_client_with_keys_does_not_speak_to_a_server_without(opener: Opener, folder: Path) -> None:
    impostor = opener(serve=True)
    opener(impostor.address, serve=False, key_folder=folder).send(HELLO)
    assert not impostor.wait(SILENCE_S)


@pytest.mark.parametrize("serve", [True, False])
@pytest.mark.parametrize("host", ["10.0.0.1", "node7", "[2001:db8::1]"])
def test_off_the_host_there_are_keys_or_nothing(host: str, serve: bool) -> None:
    with pytest.raises(ConfigError, match="can be reached from other hosts, and there are no keys"):
        SocketMailbox(f"tcp://{host}:5570", serve=serve)


def test_every_address_of_the_host_needs_keys(opener: Opener, folder: Path) -> None:
    with pytest.raises(ConfigError, match="no keys"):
        SocketMailbox("tcp://*:0", serve=True)
    served = opener("tcp://*:0", serve=True, key_folder=folder)
    port = served.address.rpartition(":")[2]
    greet(opener(f"tcp://127.0.0.1:{port}", serve=False, key_folder=folder), served)


@pytest.mark.parametrize(("serve", "name"), [(True, "server.key_secret"), (False, "client.key_secret")])
def test_keys_that_others_may_read_are_refused(folder: Path, serve: bool, name: str) -> None:
    (folder / name).chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        SocketMailbox("tcp://127.0.0.1:5570", serve=serve, key_folder=folder)


def test_a_socket_in_a_file_is_the_user_s_alone_and_goes_with_its_end(opener: Opener, tmp_path: Path) -> None:
    served = opener(f"ipc://{tmp_path}/socket", serve=True)
    assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
    served.close()
    assert not (tmp_path / "socket").exists()


def test_a_successor_s_socket_is_left_alone(opener: Opener, tmp_path: Path) -> None:
    former = opener(f"ipc://{tmp_path}/socket", serve=True)
    (tmp_path / "socket").unlink()
    latter = opener(f"ipc://{tmp_path}/socket", serve=True)
    former.close()
    greet(opener(latter.address, serve=False), latter)


def test_an_address_in_use_is_refused(opener: Opener, tmp_path: Path) -> None:
    for address in ("tcp://127.0.0.1:0", f"ipc://{tmp_path}/socket"):
        served = opener(address, serve=True)
        with pytest.raises(MailboxError):
            SocketMailbox(served.address, serve=True)
        greet(opener(served.address, serve=False), served)


def test_an_address_of_another_host_cannot_be_served(folder: Path) -> None:
    with pytest.raises(MailboxError, match="cannot be served"):
        SocketMailbox("tcp://192.0.2.1:5570", serve=True, key_folder=folder)


def test_closing_twice_does_nothing(opener: Opener, folder: Path) -> None:
    served = opener(serve=True, key_folder=folder)
    served.close()
    served.close()
