"""Sockets of one host: names, loss where nobody listens, and addresses that are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_specrollout.cluster.group.channel import ZmqHub, ZmqLine, wait
from vllm_specrollout.cluster.group.messages import Cancel, Here, Message, Race
from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.errors import ConfigError


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'hub'}"


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    ends: list[Any] = []
    yield ends
    for end in ends:
        end.close()


def taken(end: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        wait([end], 5.0)
        found += end.receive()
    return found


def said(line: ZmqLine, hub: ZmqHub, message: Message) -> None:
    """Send until it has arrived: a connection takes a moment."""
    while not (found := hub.receive()):
        line.send(message)
        wait([hub], 0.02)
    assert found[0][1] == message


def test_a_worker_is_known_by_its_name_and_answered(address: str, opened: list[Any]) -> None:
    hub, line = ZmqHub(address), ZmqLine(address, "w0", may_lose=False)
    opened += [hub, line]
    said(line, hub, Here(3))
    hub.send("w0", Race("r", "ngram"))
    hub.send("nobody", Race("r", "ngram"))
    assert taken(line, 1) == [Race("r", "ngram")]


def test_what_nobody_was_there_to_hear_is_not_heard_later(address: str, opened: list[Any]) -> None:
    line = ZmqLine(address, "w0", may_lose=True)
    opened.append(line)
    for _ in range(50):
        line.send(Here(1))
    hub = ZmqHub(address)
    opened.append(hub)
    said(line, hub, Here(2))


def test_a_hub_that_is_begun_anew_is_found_again(address: str, opened: list[Any]) -> None:
    line = ZmqLine(address, "w0", may_lose=True)
    first = ZmqHub(address)
    said(line, first, Here(1))
    first.close()
    second = ZmqHub(address)
    opened += [line, second]
    said(line, second, Here(2))


def test_nonsense_is_refused_and_named_once(address: str, opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    hub, line = ZmqHub(address), ZmqLine(address, "w0", may_lose=False)
    opened += [hub, line]
    said(line, hub, Here(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            line.socket.send(b"nonsense")
        line.socket.send_multipart([b"two", b"parts"], zmq.DONTWAIT)
        line.send(Cancel("r"))
        assert taken(hub, 1) == [("w0", Cancel("r"))]
    assert len([one for one in caplog.records if "refused" in one.message]) == 1
    assert hub._refusals.counts == {"text": 3}


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:5570", "tcp://*:0", "ipc://@name", "shm://x", ""])
def test_an_address_that_is_not_of_this_host_alone_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        ZmqHub(wrong)
    with pytest.raises(ConfigError):
        ZmqLine(wrong, "w0", may_lose=True)


def test_a_second_hub_at_one_address_is_refused(address: str, opened: list[Any]) -> None:
    opened.append(ZmqHub(address))
    with pytest.raises(MailboxError):
        ZmqHub(address)
