"""From an address to a mailbox."""

from __future__ import annotations

from pathlib import Path

from vllm_specrollout.cluster.mailbox import Mailbox
from vllm_specrollout.cluster.ring import RingMailbox
from vllm_specrollout.errors import ConfigError


def connect(address: str, keys: str | None = None) -> Mailbox:
    """Open a mailbox to a drafter that serves there already. What it said to others that were here before is dropped.

    Raises:
        ConfigError: the address or the keys cannot be used.
        MailboxError: nobody serves there, or another engine is there.
    """
    if address.startswith("ipc://"):
        from vllm_specrollout.cluster import endpoint

        # ZeroMQ would wait for somebody to come, without a word
        endpoint.check_served(address)
    mailbox = open_mailbox(address, serve=False, keys=keys or None)
    while mailbox.receive():
        pass
    return mailbox


def open_mailbox(address: str, *, serve: bool, keys: Path | str | None = None) -> Mailbox:
    """Open one end of a mailbox.

    Args:
        address: shm://NAME for processes of one host, ipc://PATH, or tcp://HOST:PORT.
        serve: whether this end makes it, as verifiers do, or connects to it, as drafters do. Shared memory has to be
            served before it can be opened; sockets may be opened in any order.
        keys: the directory of the CURVE keys; needed where `tcp` leaves the host.

    Raises:
        ConfigError: the address or the keys cannot be used.
        MailboxError: the address is in use, or nobody serves the shared memory yet.
    """
    scheme, separator, name = address.partition("://")
    if scheme == "shm" and separator:
        if keys is not None:
            cause = f"`{address}` is shared memory, which takes no keys"
            raise ConfigError(cause, "leave the keys out: only processes of the same user can open it")
        return RingMailbox(name, serve=serve)
    if scheme in ("ipc", "tcp") and separator:
        # ZeroMQ takes a while to import, and most mailboxes are in shared memory
        from vllm_specrollout.cluster.socket_mailbox import SocketMailbox

        folder = None if keys is None else Path(keys)
        return SocketMailbox(address, serve=serve, key_folder=folder)
    cause = f"`{address[:140]}` is no address of a mailbox"
    raise ConfigError(cause, "write shm://NAME, ipc://PATH or tcp://HOST:PORT")
