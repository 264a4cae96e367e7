"""Mail over real sockets: who gets in, what is lost, what is left, and that nobody waits."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.waiting import until
from vllm_specrollout.cluster import mail
from vllm_specrollout.cluster.mail import HIGH_WATER, MailClient, MailError, MailServer, check_served
from vllm_specrollout.cluster.messages import VERSION, Bye, Hello, Message
from vllm_specrollout.errors import ConfigError

HELLO = Hello(VERSION, 50)


@pytest.fixture(autouse=True)
def _no_end_stays_open() -> Iterator[None]:
    yield
    while mail._contexts:
        mail._contexts.pop().destroy(linger=0)


def heard(end: MailServer | MailClient) -> list[Any]:
    found: list[Any] = []
    until(lambda: found.extend(end.receive()) or found)
    return found


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both ends."""
    monkeypatch.setenv("SPECROLLOUT_KEY", "5a" * 32)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path, key: None) -> str:
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_two_engines_and_a_drafter_hear_each_other(address: str) -> None:
    office = MailServer(address)
    boxes = [MailClient(office.address) for _ in range(2)]
    for i, box in enumerate(boxes):
        assert box.send(Hello(VERSION, i))
    said: list[tuple[bytes, Message]] = []
    until(lambda: said.extend(office.receive()) or len(said) == 2)
    for name, message in said:
        assert office.send(name, Bye(str(message.vocab_size)))
    assert [heard(box) for box in boxes] == [[Bye("0")], [Bye("1")]]


def test_a_drafter_that_is_begun_anew_is_found_again_and_hears_what_waited(address: str) -> None:
    office = MailServer(address)
    where, box = office.address, MailClient(office.address)
    box.send(HELLO)
    heard(office)
    office.close()
    for _ in range(3):
        assert box.send(HELLO)
    office = MailServer(where)
    assert {message for _, message in heard(office)} == {HELLO}


def test_what_is_full_refuses_and_never_waits(tmp_path: Path) -> None:
    box = MailClient(f"ipc://{tmp_path}/nobody")
    sent = [box.send(HELLO) for _ in range(HIGH_WATER + 10)]
    assert sent.count(False) >= 10 and sent[0]


def test_an_engine_that_is_gone_is_said_to_be(address: str) -> None:
    office = MailServer(address)
    box = MailClient(office.address)
    box.send(HELLO)
    ((name, _),) = heard(office)
    box.close()
    until(lambda: not office.send(name, HELLO))
    assert not office.send(name, HELLO), "and it stays so"


def test_garbage_is_counted_and_what_comes_behind_it_is_heard(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    office = MailServer(address)
    context = zmq.Context()
    rude = context.socket(zmq.DEALER)
    rude.connect(address)
    for data in (b"", b"\xff" * 100, os.urandom(1000)):
        rude.send(data)
    rude.send_multipart([b"one", b"two"])
    box = MailClient(address)
    box.send(HELLO)
    assert heard(office)[-1][1] == HELLO
    until(lambda: list(office.receive()) or office.malformed == 4)
    context.destroy(linger=0)


def test_nobody_gets_in_without_the_key(tmp_path: Path) -> None:
    office = MailServer("tcp://127.0.0.1:0", key_file=str(tmp_path / "made" / "key"))
    key = (tmp_path / "made" / "key").read_text().strip()
    (tmp_path / "wrong").write_text("0" * 63 + "1")
    wrong = MailClient(office.address, key_file=str(tmp_path / "wrong"))
    wrong.send(HELLO)
    context = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.connect(office.address)
    bare.send(b"hello")
    right = MailClient(office.address, key_file=str(tmp_path / "made" / "key"))
    right.send(Bye("it is me"))
    assert [message for _, message in heard(office)] == [Bye("it is me")]
    assert len(key) == 64 and key not in office.address + right.address, "what is shown has no key"
    assert (tmp_path / "made" / "key").stat().st_mode & 0o777 == 0o600
    time.sleep(0.2)
    assert not list(office.receive()) and not office.malformed
    context.destroy(linger=0)


def test_each_key_is_drawn_once(tmp_path: Path) -> None:
    texts = list[str]()
    for name in ("a", "b", "a"):
        MailServer("tcp://127.0.0.1:0", key_file=str(tmp_path / name)).close()
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[2] != texts[1]


def test_an_engine_is_told_the_hosts_name_where_a_drafter_listens_everywhere(key: None) -> None:
    for host in ("*", "0.0.0.0"):
        office = MailServer(f"tcp://{host}:0")
        assert office.address.startswith(f"tcp://{socket.gethostname()}:")


def test_of_an_address_with_a_key_neither_is_taken_nor_shown() -> None:
    for end in (MailServer, MailClient):
        with pytest.raises(ConfigError, match="a key has no place in an address") as error:
            end("tcp://127.0.0.1:5570/" + "ab" * 32)
        assert "abab" not in str(error.value)


NO_ADDRESS = [
    "",
    "shm://x",
    "ipc://",
    "ipc://@x",
    "ipc://*",
    "ipc:///" + "x" * 200,
    "tcp://1.2.3.4",
    "tcp://h:99999",
    "tcp://h:1/short",
]


@pytest.mark.parametrize("address", NO_ADDRESS)
def test_what_is_no_address_is_one_clear_error(address: str) -> None:
    for end in (MailServer, MailClient):
        with pytest.raises(ConfigError, match=r"hint: \S"):
            end(address)


@pytest.mark.parametrize("text", [None, "", "short", "missing/key"])
def test_an_engine_posts_nothing_over_tcp_without_a_key(text, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("SPECROLLOUT_KEY", raising=False)
    (tmp_path / "key").write_text(text or "")
    file = "" if text is None else str(tmp_path / (text if text and "/" in text else "key"))
    with pytest.raises(ConfigError, match="no key|names no file with a key"):
        MailClient("tcp://127.0.0.1:5570", key_file=file)


@pytest.mark.parametrize("address", ["tcp://*:5570", "tcp://127.0.0.1:0"])
def test_only_a_drafter_may_leave_host_or_port_open(address: str, key: None) -> None:
    with pytest.raises(ConfigError, match="no end to connect to"):
        MailClient(address)


def test_nothing_else_is_removed_for_a_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        MailServer(f"ipc://{tmp_path}/file")
    with pytest.raises(ConfigError, match="no directory"):
        MailServer(f"ipc://{tmp_path}/none/socket")
    office = MailServer(f"ipc://{tmp_path}/socket")
    with pytest.raises(ConfigError, match="another process listens"):
        MailServer(f"ipc://{tmp_path}/socket")
    for _ in range(2):
        office.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_socket_is_its_owners_alone_and_one_left_behind_is_taken_over(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "socket"))
    left.close()
    MailServer(f"ipc://{tmp_path}/socket")
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


def test_whether_somebody_serves_is_known(address: str) -> None:
    office = MailServer(address)
    check_served(office.address)
    office.close()
    with pytest.raises(MailError, match="nobody serves"):
        check_served(office.address)


def test_ends_that_are_forgotten_hold_no_process_up() -> None:
    code = (
        "import gc, tempfile\n"
        "from vllm_specrollout.cluster.mail import MailClient, MailServer\n"
        "office = MailServer(f'ipc://{tempfile.mkdtemp()}/s')\n"
        "box = MailClient(office.address)\n"
        "del office, box\n"
        "gc.collect()\n"
        "print('forgotten')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "forgotten\n", ""), "it has ended, by itself"


def test_a_hundred_engines_come_and_go_and_leave_nothing(tmp_path: Path) -> None:
    office = MailServer(f"ipc://{tmp_path}/socket")
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        box = MailClient(office.address)
        box.send(HELLO)
        heard(office)
        box.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= files + 4)
    office.close()
    assert not mail._contexts
