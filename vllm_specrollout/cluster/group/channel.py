"""Channels of messages: sockets between the processes of one host, and what the loops need of them.

ZeroMQ over ipc alone: whoever can open the path may speak, so the folder that it lies in must be the user's own. An
address that leaves the host is refused.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol

import zmq

from vllm_specrollout.cluster import endpoint
from vllm_specrollout.cluster.group.messages import MOST_BYTES, GroupMessageError, Message, decode, encode
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")

_MOST_WAITING = 16


class Line(Protocol):
    """A worker's end of the connection to the driver, or to the coordinator."""

    def send(self, message: Message) -> None:
        """Nothing happens where nobody is there."""
        ...

    def receive(self) -> list[Message]:
        """What has come; does not wait."""
        ...


class Hub(Protocol):
    """The other end, which many workers share."""

    def send(self, worker: str, message: Message) -> None:
        """Nothing happens where the worker is gone."""
        ...

    def receive(self) -> list[tuple[str, Message]]:
        """(worker, message) of all that has come; does not wait."""
        ...


class Refusals:
    """Names each kind of mistake once."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.counts: dict[str, int] = {}

    def read(self, data: bytes) -> Message | None:
        """The message; None: it is none."""
        try:
            return decode(data)
        except GroupMessageError as error:
            count = self.counts[error.fault] = self.counts.get(error.fault, 0) + 1
            if count == 1:
                logger.warning("Spec rollout: refused at %s: %s", self._at, error.cause)
            return None


def check_address(address: str) -> Path:
    """The socket's path.

    Raises:
        ConfigError: it is no ipc address, or leaves the host.
    """
    where = endpoint.parse(address, serve=True)
    if where.path is None:
        raise ConfigError(f"`{address}` is no ipc address, and a group lives on one host", "write ipc:///PATH")
    return where.path


class ZmqLine:
    """A worker's end.

    Args:
        name: the worker's; the other end knows it by that.
        may_lose: drop messages for an end that does not read them; else they are kept.

    Raises:
        ConfigError: as `check_address`.
    """

    def __init__(self, address: str, name: str, *, may_lose: bool) -> None:
        check_address(address)
        self._refusals = Refusals(address)
        self._context = endpoint.new_context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.identity = name.encode()
        # what nobody is there to hear is not kept for whoever comes later
        self.socket.immediate = True
        self.socket.sndhwm = _MOST_WAITING if may_lose else 0
        self.socket.maxmsgsize = MOST_BYTES
        self.socket.connect(address)

    def send(self, message: Message) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode(message), zmq.DONTWAIT)

    def receive(self) -> list[Message]:
        taken = (self._refusals.read(parts[-1]) for parts in _all(self.socket))
        return [message for message in taken if message is not None]

    def close(self) -> None:
        endpoint.end_context(self._context)


class ZmqHub:
    """The end that workers connect to.

    Raises:
        ConfigError: as `check_address`, or the path is taken by something else.
        MailboxError: another process listens there.
    """

    def __init__(self, address: str) -> None:
        path = check_address(address)
        endpoint.claim(path)
        self._refusals = Refusals(address)
        self._context = endpoint.new_context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        # a worker that is gone is an error, and one that comes back under its name takes its place
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.maxmsgsize = MOST_BYTES
        self.socket.bind(address)

    def send(self, worker: str, message: Message) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([worker.encode(), encode(message)], zmq.DONTWAIT)

    def receive(self) -> list[tuple[str, Message]]:
        taken = []
        for parts in _all(self.socket):
            message = self._refusals.read(parts[-1]) if len(parts) == 2 else None
            if message is not None:
                taken.append((parts[0].decode(errors="replace"), message))
        return taken

    def close(self) -> None:
        endpoint.end_context(self._context)


def wait(lines: list[ZmqLine] | list[ZmqHub], timeout_s: float) -> None:
    """Until something comes to one of them, or the time is over."""
    poller = zmq.Poller()
    for line in lines:
        poller.register(line.socket, zmq.POLLIN)
    poller.poll(int(timeout_s * 1e3))


def _all(socket: zmq.Socket[bytes], most: int = 4096) -> list[list[bytes]]:
    taken: list[list[bytes]] = []
    while len(taken) < most:
        try:
            taken.append(socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            break
    return taken
