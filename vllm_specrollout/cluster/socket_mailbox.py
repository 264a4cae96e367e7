"""Messages over ZeroMQ: between processes of a host (ipc, tcp to 127.0.0.1), and between hosts, with CURVE keys alone.

The end that serves is a ROUTER, which answers whoever sent the last good message; so a drafter that was restarted is
answered at once, while what its predecessor left behind dies with its connection. The other end is a DEALER.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import zmq
import zmq.auth.thread

from vllm_specrollout.cluster import endpoint, keys
from vllm_specrollout.cluster.codec import MAX_MESSAGE
from vllm_specrollout.cluster.mailbox import MailboxError, MailboxStats, Tracker
from vllm_specrollout.cluster.messages import Fault, Message, MessageError
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")

HIGH_WATER = 1024
"""Messages that each end queues each way: eight steps of the verdicts of 128 requests."""
_ENCRYPTED = 64
"""Bytes that CURVE adds to a message, and some."""
# a host that vanished without a word is given up after this long, queue and all
_HEARTBEAT_MS, _SILENCE_MS = 1000, 3000
_DOMAIN = "specrollout"
_LINGER_MS = 1000  # for the last words of a client: so long they may take to leave this host

_Socket = zmq.Socket[bytes]


class SocketMailbox:
    """A mailbox (see `Mailbox`) over ZeroMQ. The end that serves can send once the other one has sent something."""

    def __init__(self, address: str, *, serve: bool, key_folder: Path | None = None) -> None:
        """
        Args:
            address: ipc://PATH or tcp://HOST:PORT; port 0 serves at any free one.
            key_folder: with the CURVE keys that `specrollout keys` writes.

        Raises:
            ConfigError: no such address, one off the host without keys, or keys that cannot be used.
            MailboxError: the address is in use, or not this host's.
        """
        where = endpoint.parse(address, serve=serve)
        if not where.is_local and key_folder is None:
            cause = f"`{address}` can be reached from other hosts, and there are no keys"
            raise ConfigError(cause, "make keys with `specrollout keys DIR` and give their directory, or use 127.0.0.1")
        # read before anything is opened: whatever is wrong with them leaves nothing behind
        server_keys = keys.load_server(key_folder) if key_folder is not None and serve else None
        client_keys = keys.load_client(key_folder) if key_folder is not None and not serve else None
        if serve and where.path is not None:
            endpoint.claim(where.path)
        self._tracker = Tracker()
        self._serves = serve
        self._peer: bytes | None = None  # the connection to answer on
        self._is_closed = False
        self._file: tuple[Path, os.stat_result] | None = None  # of a socket that this end made
        self._context = endpoint.new_context()
        self._guard: _Guard | None = None
        try:
            self._socket = self._make_socket(where)
            if server_keys is not None:
                self._guard = _Guard(self._context, self._socket, server_keys)
            if client_keys is not None:
                self._socket.curve_publickey, self._socket.curve_secretkey = client_keys.public, client_keys.secret
                self._socket.curve_serverkey = client_keys.server
            self.address = self._open(where)
        except BaseException:
            self.close()
            raise

    def _make_socket(self, where: endpoint.Endpoint) -> _Socket:
        made = self._context.socket(zmq.ROUTER if self._serves else zmq.DEALER)
        made.linger = 0
        made.sndhwm = made.rcvhwm = HIGH_WATER
        # longer ones end the connection before memory is taken for them
        made.maxmsgsize = MAX_MESSAGE + _ENCRYPTED
        made.ipv6 = where.is_ipv6
        made.heartbeat_ivl, made.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        if self._serves:
            made.router_mandatory = True  # a full queue and a peer that is gone are errors, not silence
        return made

    def _open(self, where: endpoint.Endpoint) -> str:
        """Bind or connect; returns the address for the other end."""
        try:
            if not self._serves:
                self._socket.connect(where.address)
                return where.address
            self._socket.bind(where.address)
        except zmq.ZMQError as error:
            cause = f"`{where.address}` cannot be {'served' if self._serves else 'reached'}: {error.strerror}"
            raise MailboxError(cause, "choose an address of this host that is free") from None
        if where.path is not None:
            os.chmod(where.path, 0o600)
            self._file = (where.path, os.stat(where.path))
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def stats(self) -> MailboxStats:
        return replace(self._tracker.stats, refused=self._guard.refused if self._guard else 0)

    def send(self, message: Message) -> bool:
        data = self._tracker.seal(message)
        if self._serves and self._peer is None:
            return self._tracker.note_sent(data, was_sent=False)
        frames = [data] if self._peer is None else [self._peer, data]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return self._tracker.note_sent(data, was_sent=False)
        return self._tracker.note_sent(data, was_sent=True)

    def receive(self, most: int = 256) -> list[Message]:
        arrived: list[tuple[bytes, bytes]] = []  # the connection's name, and the message
        wanted = 2 if self._serves else 1  # a ROUTER puts the name before the message
        for _ in range(most):
            frames, count = self._take(wanted)
            if not count:
                break
            if count == wanted:
                arrived.append((frames[0] if self._serves else b"", frames[-1]))
            else:
                cause = f"a message came in {count} parts, not {wanted}"
                self._tracker.note_malformed(MessageError(Fault.SIZE, cause))
        messages = []
        for name, run in itertools.groupby(arrived, key=lambda pair: pair[0]):
            found = self._tracker.unseal([data for _, data in run])
            messages += found
            if found and self._serves:
                self._peer = name
        return messages

    def _take(self, most: int) -> tuple[list[bytes], int]:
        """The first parts of the next message, and how many parts it has; 0: there is none."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return [], 0
        count = 1
        # a message arrives whole or not at all, so the other parts are here
        while self._socket.rcvmore:
            frame = self._socket.recv(zmq.NOBLOCK)
            count += 1
            if count <= most:
                frames.append(frame)
        return frames, count

    def wait(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(math.ceil(timeout_s * 1000.0), zmq.POLLIN))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._guard is not None:
                self._guard.close()
            if self._serves or not self._tracker.stats.sent:
                endpoint.end_context(self._context)
            else:
                # that it leaves is the last thing a client says, and it waits for nobody while that goes out
                threading.Thread(
                    target=endpoint.end_context, args=(self._context, _LINGER_MS), name="specrollout-last-words"
                ).start()
            if self._file is not None:
                self._remove(*self._file)

    @staticmethod
    def _remove(path: Path, status: os.stat_result) -> None:
        """Remove a socket's file, which ZeroMQ leaves, unless another process put its own there."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), status):
                path.unlink()


class _Guard:
    """Lets in the clients whose public keys are listed, and nobody else."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], served: zmq.Socket[bytes], own: keys.ServerKeys
    ) -> None:
        self.refused = 0
        self._clients = own.clients
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        served.curve_server = True
        served.curve_publickey, served.curve_secretkey = own.public, own.secret
        served.zap_domain = _DOMAIN.encode()
        # should the thread that asks `callback` be gone, nobody is let in, instead of everybody
        served.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect; pyzmq calls it, in a thread of its own, with the key as Z85 text."""
        is_listed = key in self._clients
        if not is_listed:
            if not self.refused:
                logger.warning("a client with an unlisted key was refused, and others will be without a word: %r", key)
            self.refused += 1
        return is_listed

    def close(self) -> None:
        self._authenticator.stop()
