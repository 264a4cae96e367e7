"""A mailbox: what every transport of messages promises, and what all of them do alike.

May enter: the interface, numbers, sessions, counts. May not: how bytes travel (ring.py, socket_mailbox.py).
Nothing waits for the other end, nothing grows, and whatever arrives can at worst be dropped and counted.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_specrollout.cluster.codec import Frame, encode, opened
from vllm_specrollout.cluster.messages import Fault, Message, MessageError
from vllm_specrollout.errors import SpecRolloutError

logger = logging.getLogger("vllm.specrollout")

_MOST_RETIRED = 64
"""Former sessions of the other end that are remembered, so that what is left of them is not taken for a restart."""


_ROUNDS = 16
"""Times that a mailbox is asked at once, at most: 4,096 messages. A full ring holds 5,000 trees of 64 nodes."""


class MailboxError(SpecRolloutError):
    """A mailbox cannot be opened: nobody serves it yet, another process holds it, or the host has no room for it."""


@dataclass(slots=True)
class MailboxStats:
    """What became of the messages of one end, counted since it was opened."""

    sent: int = 0  # handed to the transport
    received: int = 0  # returned by `receive`
    dropped_full: int = 0  # not sent: the other end does not keep up, or nobody is there
    malformed: int = 0  # arrived and were refused
    doubled: int = 0  # arrived and were dropped: had come before, came behind a later one, or of a former session
    superseded: int = 0  # trees that arrived together with a newer one of their request, and were not read
    missing: int = 0  # numbers that were passed over; one that comes after all is in `doubled`, too
    bytes: int = 0  # sent and received
    sessions: int = 0  # lives of the other end that were seen: above 1, it was restarted
    resynchronised: int = 0  # times that a ring's positions made no sense, and what lay in it was dropped
    refused: int = 0  # connections with a key that is not listed


class Mailbox(Protocol):
    """One end of a connection between a verifier and a drafter. For one thread, and one process, at a time."""

    @property
    def address(self) -> str:
        """Where the other end opens it."""
        ...

    @property
    def stats(self) -> MailboxStats: ...

    def send(self, message: Message) -> bool:
        """Hand over a message without waiting.

        False: there is no room, or over sockets nobody has come yet. The message is dropped and counted, and its number
        is used up, so the other end notices.

        Raises:
            MessageError: the message itself breaks a limit.
        """
        ...

    def receive(self, most: int = 256) -> list[Message]:
        """What has arrived, in order, without waiting; at most that many messages are looked at.

        Of a request's trees among them the newest comes alone: each is whole, so the others say nothing more.
        """
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has arrived, whatever it is; False: nothing has. For drafters: verifiers never wait."""
        ...

    def close(self) -> None:
        """Let go of it; what is still on the way is lost. A second time it does nothing."""
        ...


def drained(receive: Callable[[], list[Message]]) -> Iterator[Message]:
    """All that has arrived, in order. Of more than may be heard without a pause, the rest comes the next time.

    Whoever took less than comes in its turn would fall behind for good, by as much as lies between the ends: what it
    heard then would always be old.

    Args:
        receive: of the mailbox.
    """
    for _ in range(_ROUNDS):
        messages = receive()
        if not messages:
            return
        yield from messages


class Tracker:
    """Numbers what one end sends, and checks, orders and counts what arrives."""

    def __init__(self) -> None:
        self.stats = MailboxStats()
        self._session = secrets.randbits(64)
        self._next_number = 0
        # the other end's session, and the last number of it
        self._peer: int | None = None
        self._last_number = -1
        self._retired: deque[int] = deque(maxlen=_MOST_RETIRED)
        self._logged: set[Fault] = set()

    def seal(self, message: Message) -> bytes:
        """A message's bytes, under this end's next number.

        Raises:
            MessageError: the message breaks a limit; the number is not used up.
        """
        data = encode(message, self._session, self._next_number)
        self._next_number += 1
        return data

    def note_sent(self, data: bytes, *, was_sent: bool) -> bool:
        """Count a message that was sent, or could not be; returns which."""
        if was_sent:
            self.stats.sent += 1
            self.stats.bytes += len(data)
        else:
            self.stats.dropped_full += 1
        return was_sent

    def unseal(self, arrived: Sequence[bytes]) -> list[Message]:
        """The messages in what arrived, as `Mailbox.receive` has them; what was refused, or had come before, is not in.

        A drafter sends a tree with each pass, several in a step of its verifier. To read one takes ten times as long
        as to see that it came whole.
        """
        frames = [frame for frame in map(self._open, arrived) if frame is not None]
        # numbers, by session and request
        newest: dict[tuple[int, int], int] = {}
        for frame in frames:
            if (handle := frame.tree_of) is not None:
                key = frame.session, handle
                newest[key] = max(newest.get(key, 0), frame.number)
        messages = []
        for frame in frames:
            handle = frame.tree_of
            if handle is not None and frame.number < newest[frame.session, handle]:
                self.stats.superseded += self._note_number(frame)
            elif (message := self._read(frame)) is not None and self._note_number(frame):
                self.stats.received += 1
                messages.append(message)
        return messages

    def _open(self, data: bytes) -> Frame | None:
        self.stats.bytes += len(data)
        try:
            return opened(data)
        except MessageError as error:
            self.note_malformed(error)
            return None

    def _read(self, frame: Frame) -> Message | None:
        try:
            return frame.message()
        except MessageError as error:
            self.note_malformed(error)
            return None

    def _note_number(self, frame: Frame) -> bool:
        """Whether the message comes in its turn; False: it had come before, or a later one had."""
        stats = self.stats
        if frame.session != self._peer and frame.session not in self._retired:
            self._begin(frame.session)
            stats.sessions += 1
        if frame.session != self._peer or frame.number <= self._last_number:
            stats.doubled += 1
            return False
        stats.missing += frame.number - self._last_number - 1
        self._last_number = frame.number
        return True

    def note_malformed(self, error: MessageError) -> None:
        """Count and log something that a transport refused itself."""
        self.stats.malformed += 1
        self._log(error)

    def _begin(self, session: int) -> None:
        if self._peer is not None:
            self._retired.append(self._peer)
        self._peer, self._last_number = session, -1

    def _log(self, error: MessageError) -> None:
        # a broken or hostile other end must not fill the log, so there is one line for each kind of fault
        if error.fault not in self._logged:
            self._logged.add(error.fault)
            logger.warning("a message was dropped, and others like it will be without a word: %s", error)
