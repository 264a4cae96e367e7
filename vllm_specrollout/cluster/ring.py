"""Messages between two processes of one host: two byte rings in one piece of shared memory.

A ring has one writer and one reader. Each keeps its own position to itself and publishes a copy, which is all that the
other one reads; so there are no locks, and a position that makes no sense can be told. Positions are 64-bit counters of
bytes: capacity is a power of two, so they wrap by themselves. A frame is its length (u32) and its bytes.

The writer publishes its position after the bytes, which x86 keeps in this order for the reader. Where a processor does
not, the message's checksum fails and it is dropped like any damaged one.
"""

from __future__ import annotations

import logging
import struct
import time
from dataclasses import replace

from vllm_specrollout.cluster import segment
from vllm_specrollout.cluster.codec import MAX_MESSAGE
from vllm_specrollout.cluster.mailbox import MailboxError, MailboxStats, Tracker
from vllm_specrollout.cluster.messages import Message
from vllm_specrollout.errors import ConfigError

logger = logging.getLogger("vllm.specrollout")

CAPACITY = 1 << 22
"""Bytes of each ring: two of the longest messages, or the verdicts of thousands of steps."""
MIN_CAPACITY, MAX_CAPACITY = segment.PAGE // 2, 1 << 28

_LENGTH = struct.Struct("<I")
_WRAP = (1 << 64) - 1
# 64-bit words of the segment's first page where each ring publishes its positions: a cache line for each
_WORDS = ((8, 16), (24, 32))

# A process that waits must not eat the core that the other one computes on, and Python has no wait on shared memory
# that does without. So it sleeps, first as short as the kernel's timer allows, then longer, up to what a verifier's
# step hardly feels. Waiting for long then takes 2 % of a core (measured; 6 % with 0.2 ms).
_FIRST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


class ByteRing:
    """One direction. A process uses either `write` or `read` of it."""

    def __init__(self, words: memoryview, written: int, taken: int, data: memoryview) -> None:
        """
        Args:
            words: [n] of 64 bits, in which positions are published.
            written, taken: which words: the writer's position, the reader's.
            data: the ring's bytes, a power of two of them.
        """
        self._words, self._data = words, data
        self._written, self._taken = written, taken
        self._capacity = len(data)
        # a process that follows another one goes on where that one was
        self._write_position: int = words[written]
        self._read_position: int = words[taken]
        self.resynchronised = 0
        """Times that the other one's position made no sense."""

    @property
    def has_any(self) -> bool:
        """For the reader: whether `read` has something to do."""
        return self._words[self._written] != self._read_position

    def could_hold(self, frame: bytes) -> bool:
        """Whether an empty ring has room for it."""
        return _LENGTH.size + len(frame) <= self._capacity

    def write(self, frame: bytes) -> bool:
        """Append a frame; False: there is no room for it now, or the reader's position makes no sense."""
        used = (self._write_position - self._words[self._taken]) & _WRAP
        size = _LENGTH.size + len(frame)
        if used > self._capacity:
            self._count_nonsense()
        if size > self._capacity - used:
            # Nothing is written over what the reader may still have to read. A reader that followed a wrong position
            # may take the ring for empty, so it is told the right one.
            self._words[self._written] = self._write_position
            return False
        self._copy_in(self._write_position, _LENGTH.pack(len(frame)))
        self._copy_in(self._write_position + _LENGTH.size, frame)
        self._write_position = (self._write_position + size) & _WRAP
        self._words[self._written] = self._write_position
        return True

    def read(self) -> bytes | None:
        """Take the next frame; None: there is none, or what lay there made no sense and was dropped."""
        written = self._words[self._written]
        frame = None
        if written != self._read_position:
            size = self._frame_size((written - self._read_position) & _WRAP)
            if size is None:
                self._count_nonsense()
                self._read_position = written
            else:
                frame = self._copy_out(self._read_position + _LENGTH.size, size - _LENGTH.size)
                self._read_position = (self._read_position + size) & _WRAP
        # published even if nothing came: the copy may have been damaged
        self._words[self._taken] = self._read_position
        return frame

    def _frame_size(self, used: int) -> int | None:
        """Bytes of the next frame and its length; None: there can be no frame in `used` bytes."""
        if not _LENGTH.size <= used <= self._capacity:
            return None
        size: int = _LENGTH.size + _LENGTH.unpack(self._copy_out(self._read_position, _LENGTH.size))[0]
        return size if size <= min(used, _LENGTH.size + MAX_MESSAGE) else None

    def _count_nonsense(self) -> None:
        if not self.resynchronised:
            logger.warning("a ring's positions make no sense; a message or more is lost, next time without a word")
        self.resynchronised += 1

    def _copy_in(self, position: int, data: bytes) -> None:
        start = position & (self._capacity - 1)
        first = min(len(data), self._capacity - start)
        self._data[start : start + first] = data[:first]
        self._data[: len(data) - first] = data[first:]

    def _copy_out(self, position: int, size: int) -> bytes:
        start = position & (self._capacity - 1)
        first = min(size, self._capacity - start)
        return bytes(self._data[start : start + first]) + bytes(self._data[: size - first])

    def close(self) -> None:
        self._words.release()
        self._data.release()


class RingMailbox:
    """A mailbox (see `Mailbox`) in shared memory. The end that serves it creates it, and removes it at the end."""

    def __init__(self, name: str, *, serve: bool, capacity: int = CAPACITY) -> None:
        """
        Args:
            name: of the shared memory; the same at both ends.
            capacity: bytes each way, a power of two; the end that serves decides.

        Raises:
            ConfigError: the name or the capacity cannot be used.
            MailboxError: as `segment.create` and `segment.attach`.
        """
        if serve and (not MIN_CAPACITY <= capacity <= MAX_CAPACITY or capacity & (capacity - 1)):
            cause = f"a ring of {capacity} bytes is no power of two from {MIN_CAPACITY} to {MAX_CAPACITY}"
            raise ConfigError(cause, f"choose one, for example {CAPACITY}")
        size = segment.PAGE + 2 * capacity
        self._segment = segment.create(name, size) if serve else segment.attach(name)
        self.address = f"shm://{name}"
        self._tracker = Tracker()
        self._is_closed = self._has_warned = False
        try:
            # the first ring is for what the serving end writes
            rings = self._make_rings(name)
        except BaseException:
            self._segment.close()
            raise
        self._out, self._in = rings if serve else rings[::-1]

    def _make_rings(self, name: str) -> tuple[ByteRing, ByteRing]:
        whole = memoryview(self._segment.map)
        capacity = (len(whole) - segment.PAGE) // 2
        if capacity < MIN_CAPACITY or capacity & (capacity - 1):
            whole.release()
            cause = f"shared memory `{name}` has rings of {capacity} bytes, which is no power of two"
            raise MailboxError(cause, "remove it, and let the engine make it anew")
        starts = (segment.PAGE, segment.PAGE + capacity)
        with whole, whole[: segment.PAGE] as page:
            first, second = (
                ByteRing(page.cast("Q"), *words, whole[start : start + capacity])
                for words, start in zip(_WORDS, starts, strict=True)
            )
        return first, second

    @property
    def stats(self) -> MailboxStats:
        count = self._out.resynchronised + self._in.resynchronised
        return replace(self._tracker.stats, resynchronised=count)

    def send(self, message: Message) -> bool:
        data = self._tracker.seal(message)
        was_sent = self._out.write(data)
        if not was_sent and not self._has_warned and not self._out.could_hold(data):
            self._has_warned = True
            logger.warning(
                "a message of %d bytes was dropped: the ring of %s is too small; serve it with a larger capacity",
                len(data),
                self.address,
            )
        return self._tracker.note_sent(data, was_sent=was_sent)

    def receive(self, most: int = 256) -> list[Message]:
        arrived = []
        for _ in range(most):
            data = self._in.read()
            if data is None:
                break
            arrived.append(data)
        return self._tracker.unseal(arrived)

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        pause = _FIRST_SLEEP_S
        while not self._in.has_any:
            left = end - time.monotonic()
            if left <= 0.0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        return True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._out.close()
            self._in.close()
            self._segment.close()
