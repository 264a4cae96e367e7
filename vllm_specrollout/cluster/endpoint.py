"""Addresses for ZeroMQ: whether they are any, whether they leave the host, and whether somebody is there already.

And contexts that end when they are told to, never when they are forgotten. pyzmq ends a context that nobody holds, and
waits for its sockets meanwhile. The garbage collector may take both at once, and the context first: then nobody closes
the sockets, and the process waits for ever. So this module holds every context until it is ended.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from vllm_specrollout.cluster.mailbox import MailboxError
from vllm_specrollout.errors import ConfigError

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+|\*):([0-9]{1,5})")
_MOST_PATH = 107  # bytes that the kernel takes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that ZeroMQ understands."""

    address: str
    is_local: bool  # only processes of this host reach it
    is_ipv6: bool = False
    path: Path | None = None  # of the socket, for ipc


def parse(address: str, *, serve: bool) -> Endpoint:
    """
    Raises:
        ConfigError: it is neither ipc://PATH nor tcp://HOST:PORT.
    """
    if address.startswith("ipc://"):
        return _parse_ipc(address)
    match = _TCP.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"`{address[:140]}` is no address", "write tcp://HOST:PORT, for example tcp://127.0.0.1:5570")
    host, port = match[1], int(match[2])
    if not serve and (host == "*" or port == 0):
        cause = f"`{address}` names no end to connect to"
        raise ConfigError(cause, "only the end that serves may leave host (`*`) or port (0) open")
    # looked up, a name may lead elsewhere; written out, it stays on the host
    host = "127.0.0.1" if host == "localhost" else host
    return Endpoint(f"tcp://{host}:{port}", _is_loopback(host), is_ipv6=host.startswith("["))


def claim(path: Path) -> None:
    """See that a socket may be made there. ZeroMQ would remove whatever is in its way.

    Raises:
        ConfigError: there is something that is no socket, or no folder for it.
        MailboxError: another process listens there.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory `{path.parent}` for the socket", "make it first")
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"`{path}` is there already and is no socket", "choose another path")
    if _is_served(path):
        raise MailboxError(f"another process listens at `{path}`", "choose another path, or stop that process")


def check_served(address: str) -> None:
    """See that somebody serves at ipc://PATH.

    Raises:
        ConfigError: it is no such address.
        MailboxError: nobody does.
    """
    path = parse(address, serve=False).path
    if path is None or not path.is_socket() or not _is_served(path):
        raise MailboxError(f"nobody serves at `{address}`", "start `specrollout drafter MODEL --stay --listen ADDRESS`")


def _is_served(path: Path) -> bool:
    """Whether a process listens at a socket's file."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False  # left behind by a process that is gone
        except OSError:
            pass  # somebody is there and busy
    return True


def _parse_ipc(address: str) -> Endpoint:
    path = address.removeprefix("ipc://")
    # `*` and `@` are ZeroMQ's own: a random path, and a name without a file, which has no permissions either
    if path[:1] in ("", "*", "@") or "\0" in path or len(os.fsencode(path)) > _MOST_PATH:
        cause = f"`{address[:140]}` is no path for a socket"
        raise ConfigError(cause, f"write ipc:///PATH, with at most {_MOST_PATH} bytes in the path")
    return Endpoint(address, is_local=True, path=Path(path))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_contexts: set[zmq.Context[zmq.Socket[bytes]]] = set()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _contexts.add(made)
    return made


def end_context(context: zmq.Context[zmq.Socket[bytes]], linger_ms: int = 0) -> None:
    """Close its sockets, wait so long for what they still send, and end it. A second time does nothing."""
    context.destroy(linger=linger_ms)
    _contexts.discard(context)
