"""Two byte rings in shared memory, beside a plain deque; full, torn, abandoned, and between two processes."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.builders import CLOSE, DRAFTS, ONE_OF_EACH, OPEN, is_same
from vllm_specrollout.cluster import segment
from vllm_specrollout.cluster.codec import MAX_MESSAGE
from vllm_specrollout.cluster.mailbox import Mailbox, MailboxError
from vllm_specrollout.cluster.messages import Close
from vllm_specrollout.cluster.ring import CAPACITY, MAX_CAPACITY, MIN_CAPACITY, ByteRing, RingMailbox
from vllm_specrollout.errors import ConfigError

SMALL = 64


class Shared:
    """What a writer and a reader share: published positions, and bytes."""

    def __init__(self, start: int = 0) -> None:
        self.words = memoryview(bytearray(16)).cast("Q")
        self.words[0] = self.words[1] = start
        self.data = bytearray(SMALL)

    def ring(self) -> ByteRing:
        return ByteRing(self.words, 0, 1, memoryview(self.data))


class Twin:
    """The same ring, naively."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def write(self, frame: bytes) -> bool:
        has_room = sum(4 + len(old) for old in self.frames) + 4 + len(frame) <= SMALL
        if has_room:
            self.frames.append(frame)
        return has_room

    def read(self) -> bytes | None:
        return self.frames.popleft() if self.frames else None


# positions from which they wrap soon: at the ring's end, and at that of 64 bits
STARTS = st.sampled_from([0, 1, SMALL - 3, 2**64 - 5, 2**64 - SMALL])
FRAMES = st.binary(max_size=SMALL)


@given(STARTS, st.lists(st.none() | FRAMES, max_size=60))
def test_a_ring_does_what_a_plain_queue_of_its_size_does(start: int, steps: list[bytes | None]) -> None:
    shared, twin = Shared(start), Twin()
    writer, reader = shared.ring(), shared.ring()
    for frame in steps:
        if frame is None:
            assert reader.has_any == bool(twin.frames)
            assert reader.read() == twin.read()
        else:
            assert writer.write(frame) == twin.write(frame)
    assert writer.resynchronised == reader.resynchronised == 0


def drain(reader: ByteRing) -> list[bytes]:
    """All that is there; a ring has no more frames than bytes."""
    found = [reader.read() for _ in range(SMALL)]
    assert not reader.has_any and reader.read() is None
    return [frame for frame in found if frame is not None]


WORD = st.integers(0, 2**64 - 1) | st.integers(0, 4 * SMALL)
ATTACK = st.tuples(st.just("word"), st.integers(0, 1), WORD) | st.tuples(
    st.just("byte"), st.integers(0, SMALL - 1), st.integers(0, 255)
)


@given(STARTS, st.lists(st.none() | FRAMES | ATTACK, max_size=40))
def test_a_ring_written_over_recovers_and_never_raises(start: int, steps: list[bytes | tuple | None]) -> None:
    shared = Shared(start)
    writer, reader = shared.ring(), shared.ring()
    for step in steps:
        if step is None:
            reader.read()
        elif isinstance(step, bytes):
            writer.write(step)
        elif step[0] == "word":
            shared.words[step[1]] = step[2]
        else:
            shared.data[step[1]] = step[2]
    for _ in range(3):
        writer.write(b"afterwards")
        if drain(reader)[-1:] == [b"afterwards"]:
            break
    else:
        pytest.fail("nothing gets through any more")
    assert writer.write(b"and on") and drain(reader) == [b"and on"]


@pytest.mark.parametrize("written", [SMALL + 1, 2**63, 2**64 - 1, 1, 3])
def test_a_writer_s_position_out_of_range_is_counted(written: int) -> None:
    shared = Shared()
    reader = shared.ring()
    shared.words[0] = written
    assert reader.read() is None
    assert reader.resynchronised == 1 and not reader.has_any


def test_a_length_beyond_what_was_written_is_counted() -> None:
    shared = Shared()
    writer, reader = shared.ring(), shared.ring()
    assert writer.write(b"abc") and writer.write(b"def")
    shared.data[:4] = (11).to_bytes(4, "little")  # one more than there is
    assert reader.read() is None
    assert reader.resynchronised == 1
    assert writer.write(b"ghi") and reader.read() == b"ghi"


def test_a_reader_s_position_out_of_range_is_counted_and_nothing_written_over() -> None:
    shared = Shared()
    writer, reader = shared.ring(), shared.ring()
    assert writer.write(b"there")
    shared.words[1] = 2**40
    assert not writer.write(b"lost")
    assert writer.resynchronised == 1
    assert drain(reader) == [b"there"]
    assert writer.write(b"and on") and drain(reader) == [b"and on"]


def test_a_reader_that_followed_a_wrong_position_finds_back() -> None:
    shared = Shared()
    writer, reader = shared.ring(), shared.ring()
    shared.words[0] = 2**40
    assert reader.read() is None
    assert not writer.write(b"lost")
    assert drain(reader) == []
    assert writer.write(b"and on") and drain(reader) == [b"and on"]


def test_a_ring_full_to_its_writer_and_empty_to_its_reader_recovers() -> None:
    shared = Shared()
    writer, reader = shared.ring(), shared.ring()
    shared.words[0] = 2**64 - SMALL
    assert reader.read() is None and not reader.has_any
    assert not writer.write(b"lost")
    drain(reader)
    assert writer.write(b"and on") and drain(reader) == [b"and on"]


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def pair(name: str) -> Iterator[tuple[Mailbox, Mailbox]]:
    ours = RingMailbox(name, serve=True, capacity=MIN_CAPACITY)
    theirs = RingMailbox(name, serve=False)
    yield ours, theirs
    theirs.close()
    ours.close()


def test_messages_go_both_ways(pair: tuple[Mailbox, Mailbox]) -> None:
    for one, other in (pair, pair[::-1]):
        assert not other.wait(0.0)
        assert all(one.send(message) for message in ONE_OF_EACH)
        assert other.wait(0.0) and other.wait(5.0)
        found = other.receive()
        assert len(found) == len(ONE_OF_EACH) and all(map(is_same, found, ONE_OF_EACH))
        assert other.receive() == []


def test_no_more_messages_are_received_than_asked_for(pair: tuple[Mailbox, Mailbox]) -> None:
    ours, theirs = pair
    for number in range(5):
        ours.send(Close(number))
    assert theirs.receive(2) == [Close(0), Close(1)]
    assert theirs.receive(0) == []
    assert theirs.receive() == [Close(2), Close(3), Close(4)]


def test_a_full_ring_drops_and_counts_and_the_other_end_notices(pair: tuple[Mailbox, Mailbox]) -> None:
    ours, theirs = pair
    was_sent = [ours.send(Close(number)) for number in range(200)]
    count = was_sent.index(False)
    assert not any(was_sent[count:])
    assert (ours.stats.sent, ours.stats.dropped_full) == (count, 200 - count)
    assert theirs.receive() == [Close(number) for number in range(count)]
    assert theirs.stats.missing == 0
    assert ours.send(Close(200)) and theirs.receive() == [Close(200)]
    assert theirs.stats.missing == 200 - count


def test_a_message_that_no_ring_of_this_size_holds_is_named_once(
    pair: tuple[Mailbox, Mailbox], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = pair
    long = replace(OPEN, token_ids=np.zeros(MIN_CAPACITY, np.int32))
    assert not ours.send(long) and not ours.send(long)
    assert ours.send(CLOSE) and theirs.receive() == [CLOSE]
    assert [record.getMessage().endswith("larger capacity") for record in caplog.records] == [True]


def test_the_usual_ring_holds_the_longest_message() -> None:
    assert MAX_MESSAGE + 4 <= CAPACITY


def test_what_lies_in_the_ring_is_dropped_where_it_is_damaged(pair: tuple[Mailbox, Mailbox]) -> None:
    ours, theirs = pair
    for number in range(3):
        ours.send(Close(number))
    # the second of three equal frames, somewhere in its payload
    ours._segment.map[segment.PAGE + 44 + 40] ^= 1
    assert theirs.receive() == [Close(0), Close(2)]
    assert (theirs.stats.malformed, theirs.stats.missing, theirs.stats.resynchronised) == (1, 1, 0)


@given(st.lists(st.tuples(st.integers(64, 300) | st.integers(4096, 8191), st.binary(min_size=1, max_size=8))))
def test_shared_memory_written_over_harms_neither_end(attacks: list[tuple[int, bytes]]) -> None:
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    ours = RingMailbox(name, serve=True, capacity=MIN_CAPACITY)
    theirs = RingMailbox(name, serve=False)
    for at, data in attacks:
        ours.send(DRAFTS), theirs.send(CLOSE)
        end = min(at + len(data), len(ours._segment.map))
        ours._segment.map[at:end] = data[: end - at]
        assert all(is_same(message, CLOSE) for message in ours.receive())
        assert all(is_same(message, DRAFTS) for message in theirs.receive())
    for one, other in ((ours, theirs), (theirs, ours)):
        for _ in range(4):
            one.send(OPEN)
            found = other.receive(MIN_CAPACITY)
            if found and is_same(found[-1], OPEN):
                break
        else:
            pytest.fail("nothing gets through any more")
    theirs.close()
    ours.close()


def test_an_end_that_vanishes_costs_what_fits_the_ring(name: str) -> None:
    ours = RingMailbox(name, serve=True, capacity=MIN_CAPACITY)
    RingMailbox(name, serve=False).close()
    assert not all([ours.send(DRAFTS) for _ in range(1000)])
    assert ours.stats.sent + ours.stats.dropped_full == 1000
    assert ours.receive() == []
    ours.close()


def test_an_end_that_comes_back_is_noticed_and_goes_on(name: str) -> None:
    ours = RingMailbox(name, serve=True, capacity=MIN_CAPACITY)
    former = RingMailbox(name, serve=False)
    former.send(Close(1))
    ours.send(Close(2))
    assert former.receive() == [Close(2)]
    former.close()
    ours.send(Close(3))
    latter = RingMailbox(name, serve=False)
    latter.send(Close(4))
    assert latter.receive() == [Close(3)]
    assert ours.receive() == [Close(1), Close(4)]
    assert (ours.stats.sessions, latter.stats.sessions) == (2, 1)
    latter.close()
    ours.close()


def test_a_third_end_is_refused(name: str, pair: tuple[Mailbox, Mailbox]) -> None:
    with pytest.raises(MailboxError, match="has a guest already"):
        RingMailbox(name, serve=False)
    with pytest.raises(MailboxError, match="is served by another mailbox"):
        RingMailbox(name, serve=True)


@pytest.mark.parametrize("capacity", [0, -1, MIN_CAPACITY // 2, MIN_CAPACITY + 1, 2 * MAX_CAPACITY])
def test_a_capacity_that_is_no_power_of_two_in_range_is_refused(name: str, capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"a ring of {capacity} bytes"):
        RingMailbox(name, serve=True, capacity=capacity)


def test_rings_that_are_no_power_of_two_are_refused(name: str) -> None:
    made = segment.create(name, 3 * segment.PAGE + segment.PAGE)
    with pytest.raises(MailboxError, match="rings of 6144 bytes"):
        RingMailbox(name, serve=False)
    made.close()


def test_closing_twice_does_nothing(name: str) -> None:
    ours = RingMailbox(name, serve=True)
    ours.close()
    ours.close()
    with pytest.raises(MailboxError, match="No such file"):
        RingMailbox(name, serve=False)


ECHO = """
import sys, time
from vllm_specrollout.cluster.messages import Bye
from vllm_specrollout.cluster.ring import RingMailbox

mailbox = RingMailbox(sys.argv[1], serve=False)
while True:
    mailbox.wait(1.0)
    for message in mailbox.receive():
        if isinstance(message, Bye):
            mailbox.close()
            sys.exit()
        while not mailbox.send(message):
            time.sleep(1e-4)
"""


def test_two_processes_exchange_ten_thousand_messages(name: str) -> None:
    ours = RingMailbox(name, serve=True, capacity=MIN_CAPACITY)
    with subprocess.Popen([sys.executable, "-c", ECHO, name], stderr=subprocess.PIPE, text=True) as echo:
        came_back: list[int] = []
        for number in range(10_000):
            while not ours.send(Close(number)):
                assert echo.poll() is None, echo.stderr.read()
                ours.wait(0.1)
                came_back += [message.handle for message in ours.receive()]
        while len(came_back) < 10_000:
            assert ours.wait(60.0)
            came_back += [message.handle for message in ours.receive()]
        assert ours.send(replace(ONE_OF_EACH[-1]))
        assert (echo.wait(60.0), echo.stderr.read()) == (0, "")
    assert came_back == list(range(10_000))
    assert (ours.stats.received, ours.stats.malformed, ours.stats.doubled) == (10_000, 0, 0)
    assert ours.stats.resynchronised == 0
    ours.close()
