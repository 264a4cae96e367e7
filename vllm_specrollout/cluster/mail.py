"""Mail: messages over ZeroMQ between engines and the drafters that serve them. Nothing here waits but `wait`.

A drafter has a `MailServer`, which any number of engines write to; an engine has a `MailClient` of it. What is full
drops what comes, and says so. Between hosts a key protects what is said: whoever serves makes it, in a file that others
are given (config/keys.py).

pyzmq ends a context that nobody holds, and waits for its sockets meanwhile. The garbage collector may take both at
once, and the context first: then the process waits for ever. So this module holds every context until it is ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.backend
from msgspec import Struct
from zmq.utils import z85

from vllm_specrollout.cluster.messages import MOST_BYTES, MessageError, decode, encode
from vllm_specrollout.config.checks import check_address
from vllm_specrollout.config.keys import key_of
from vllm_specrollout.errors import ConfigError, SpecRolloutError, logger

HIGH_WATER = 256
"""Messages that each end queues each way; one a step."""
_MOST_AT_ONCE = 1024  # messages heard without a pause
_ENCRYPTED = 1024  # bytes that CURVE adds, and some
_RECONNECT_MS, _MOST_RECONNECT_MS = 50, 500
_LINGER_MS = 200  # for the last words
_KNOCK_S = 1.0
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+|\*):([0-9]{1,5})")
_MOST_PATH = 107  # bytes that the kernel takes
_IN = int(zmq.POLLIN)

_contexts: set[zmq.Context[zmq.Socket[bytes]]] = set()


class MailError(SpecRolloutError):
    """Nobody serves at an address, or another process does."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a drafter serves."""

    # as ZeroMQ understands it
    endpoint: str
    # of the socket, for ipc
    path: Path | None = None
    host: str = ""
    port: int = 0


def parse(text: str) -> Address:
    """
    Raises:
        ConfigError: it is neither ipc://PATH nor tcp://HOST:PORT.
    """
    if isinstance(text, str):
        check_address("address", text, serves=True)
    if isinstance(text, str) and text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        # `*` and `@` are ZeroMQ's own: a random path, and a name without a file, which has no permissions either
        if path[:1] in ("", "*", "@") or "\0" in path or len(os.fsencode(path)) > _MOST_PATH:
            cause = f"`{text[:140]}` is no path for a socket"
            raise ConfigError(cause, f"write ipc:///PATH, with at most {_MOST_PATH} bytes in the path")
        return Address(text, Path(path))
    match = _TCP.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"`{str(text)[:140]}` is no address", "write ipc://PATH, or tcp://HOST:PORT")
    # looked up, a name may lead elsewhere; written out, it stays on the host
    host = "127.0.0.1" if match[1] == "localhost" else match[1]
    return Address(f"tcp://{host}:{match[2]}", None, host, int(match[2]))


class _MailEnd:
    """A socket, what reads it, and a context of its own, so that nobody's last words wait for another's.

    Args:
        address: ipc://PATH or tcp://HOST:PORT, as of the class.
        read: what bytes say; by default, between an engine and a drafter.
        key_file: of tcp; empty: as the variable says.
        is_brief: whether next to nothing is queued, as of the class.
    """

    _kind = zmq.DEALER

    def __init__(
        self, address: str, read: Callable[[bytes], Any] = decode, key_file: str = "", is_brief: bool = False
    ) -> None:
        where = parse(address)
        self.malformed = 0
        """Messages that were none."""
        self._read = read
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        _contexts.add(self._context)
        try:
            made = self._socket = self._context.socket(self._kind)
            made.linger = 0
            made.sndhwm = made.rcvhwm = HIGH_WATER
            # longer ones end the connection before memory is taken for them
            made.maxmsgsize = MOST_BYTES + _ENCRYPTED
            made.ipv6 = "[" in where.host
            self._open(where, key_file, is_brief=is_brief)
        except BaseException:
            self.close()
            raise

    def _open(self, where: Address, key_file: str, *, is_brief: bool) -> None:
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has come."""
        return bool(self._socket.poll(math.ceil(timeout_s * 1e3), zmq.POLLIN))

    def close(self) -> None:
        """Its sockets, and its context. A second time it does nothing."""
        if self._context in _contexts:
            self._context.destroy(linger=_LINGER_MS)
            _contexts.discard(self._context)

    def _take(self, frames: list[bytes]) -> Any:
        """What came, if it is a message; what is none is counted, and said once."""
        try:
            if len(frames) != 1:
                raise MessageError(f"a message came in {len(frames)} parts, not 1")
            return self._read(frames[0])
        except MessageError as error:
            if not self.malformed:
                logger.warning("a message was dropped, and others like it will be without a word: %s", error)
            self.malformed += 1
            return None

    def _sent(self, data: bytes, engine: bytes = b"") -> bool:
        try:
            if engine:
                self._socket.send(engine, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True


class MailServer(_MailEnd):
    """The end that serves; port 0 is any free one. A key file that is not there is made. Where it is brief, two
    messages of each engine wait to be heard, at most.

    Raises:
        ConfigError: no such address, or no key.
        MailError: it is in use, or not this host's.
    """

    _kind = zmq.ROUTER
    _file: tuple[Path, os.stat_result] | None = None

    def _open(self, where: Address, key_file: str, *, is_brief: bool) -> None:
        own = self._socket
        # only those get in who know the key; ipc has its file's owner
        if where.path is not None:
            _claim(where.path)
        else:
            key = key_of("--key-file", key_file, makes=True)
            own.curve_server, own.curve_secretkey = True, z85.encode(bytes.fromhex(key))
        if is_brief:
            # not of what is sent: ZeroMQ hears late that a message has left, and an answer would be refused
            own.rcvhwm = 2
        own.router_mandatory = True  # a full queue and an engine that is gone are errors, not silence
        try:
            own.bind(where.endpoint)
        except zmq.ZMQError as error:
            cause = f"`{where.endpoint}` cannot be served: {error.strerror}"
            raise MailError(cause, "choose an address of this host that is free") from None
        self.address = own.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where engines post; an open host is this one's name."""
        if where.host in ("*", "0.0.0.0", "[::]"):
            self.address = f"tcp://{socket.gethostname()}:{self.address.rpartition(':')[2]}"
        if where.path is not None:
            os.chmod(where.path, 0o600)
            self._file = (where.path, os.stat(where.path))

    def receive(self) -> Iterator[tuple[bytes, Any]]:
        """What has come, in order: from which engine, and what it says."""
        for _ in range(_MOST_AT_ONCE):
            try:
                name, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := self._take(rest)) is not None:
                yield name, message

    def send(self, engine: bytes, message: Struct) -> bool:
        """False: it is gone, or does not keep up; nothing was sent."""
        return self._sent(encode(message), engine)

    def close(self) -> None:
        super().close()
        if self._file is not None:
            path, status = self._file
            with contextlib.suppress(FileNotFoundError):
                # ZeroMQ leaves it; another process may have put its own there
                if os.path.samestat(os.stat(path), status):
                    path.unlink()
            self._file = None


class MailClient(_MailEnd):
    """An engine's end. A drafter that is not there yet, or begun anew, is found whenever it comes. Where it is brief,
    one message is queued at most, and only while the other end is there.

    Raises:
        ConfigError: no such address, or no key for one of tcp.
    """

    def _open(self, where: Address, key_file: str, *, is_brief: bool) -> None:
        own, self.address = self._socket, where.endpoint
        own.reconnect_ivl, own.reconnect_ivl_max = _RECONNECT_MS, _MOST_RECONNECT_MS
        if is_brief:
            own.sndhwm, own.immediate = 1, True
        if where.path is None:
            if where.host == "*" or not where.port:
                cause = f"`{where.endpoint}` names no end to connect to"
                raise ConfigError(cause, "only a drafter may leave host (`*`) or port (0) open")
            # what it is asked for is the key of the other end; its own says nothing
            key = key_of("key_file", key_file)
            own.curve_publickey, own.curve_secretkey = zmq.curve_keypair()
            own.curve_serverkey = zmq.curve_public(z85.encode(bytes.fromhex(key)))
        try:
            own.connect(where.endpoint)
        except zmq.ZMQError as error:
            cause = f"`{where.endpoint}` cannot be reached: {error.strerror}"
            raise ConfigError(cause, "give an address at which a drafter serves") from None

    def receive(self) -> Iterator[Any]:
        """What has come, in order."""
        # to ask first costs a tenth of the exception that says that there is nothing, and numbers cost less than enums
        for _ in range(_MOST_AT_ONCE):
            events = zmq.backend.Socket.get(self._socket, zmq.EVENTS)
            if not int(events) & _IN:
                return
            if (message := self._take([self._socket.recv(zmq.NOBLOCK)])) is not None:
                yield message

    def send(self, message: Struct) -> bool:
        """False: the drafter does not keep up; nothing was sent."""
        return self._sent(encode(message))

    def has_room(self, timeout_s: float) -> bool:
        """Wait until a message could be sent."""
        return bool(self._socket.poll(math.ceil(timeout_s * 1e3), zmq.POLLOUT))


def reach() -> str:
    """Where addresses of ipc:// lead to: processes that say the same have one kernel, and one folder of sockets.

    Names of hosts would not do: those of containers differ on one host, and those of hosts may be alike.
    """
    folder = os.stat(tempfile.gettempdir())
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{kernel}:{folder.st_dev:x}:{folder.st_ino:x}"


def check_served(address: str) -> None:
    """See that somebody serves there: ZeroMQ would wait for it without a word.

    Raises:
        ConfigError: no such address.
        MailError: nobody does.
    """
    where = parse(address)
    family = socket.AF_UNIX if where.path is not None else socket.AF_INET6 if "[" in where.host else socket.AF_INET
    with socket.socket(family) as knocking:
        knocking.settimeout(_KNOCK_S)
        try:
            knocking.connect(str(where.path) if where.path is not None else (where.host.strip("[]"), where.port))
        except OSError as error:
            cause = f"nobody serves at `{where.endpoint}`: {error.strerror or error}"
            raise MailError(cause, "start `specrollout drafter MODEL --listen ADDRESS`") from None


def _claim(path: Path) -> None:
    """See that a socket may be made there. ZeroMQ would remove whatever is in its way.

    Raises:
        ConfigError: there is something that is no socket, no folder for it, or a process that listens.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory `{path.parent}` for the socket", "make it first")
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"`{path}` is there already and is no socket", "choose another path")
    with contextlib.suppress(MailError):
        check_served(f"ipc://{path}")
        raise ConfigError(f"another process listens at `{path}`", "choose another path, or stop that process")
