"""What every transport does alike: numbers, sessions, counts."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.builders import BEAT, CLOSE, DRAFTS, ONE_OF_EACH, is_same, sealed
from vllm_specrollout.cluster.codec import encode
from vllm_specrollout.cluster.mailbox import MailboxStats, Tracker
from vllm_specrollout.cluster.messages import Close, Drafts, Message, MessageError


def closes(tracker: Tracker, count: int) -> list[bytes]:
    """The bytes of `Close(0)`, `Close(1)` and so on, as one end sends them."""
    return [tracker.seal(Close(number)) for number in range(count)]


def handles(tracker: Tracker, frames: list[bytes]) -> list[int]:
    """Of the `Close`s that get through."""
    return [message.handle for frame in frames for message in tracker.unseal([frame])]


def test_messages_that_come_in_order_all_get_through() -> None:
    sender, receiver = Tracker(), Tracker()
    frames = [sender.seal(message) for message in ONE_OF_EACH]
    found = [message for frame in frames for message in receiver.unseal([frame])]
    assert all(map(is_same, found, ONE_OF_EACH))
    assert receiver.stats == MailboxStats(received=7, sessions=1, bytes=sum(map(len, frames)))


def test_a_message_that_comes_twice_gets_through_once() -> None:
    receiver = Tracker()
    first, second = closes(Tracker(), 2)
    assert handles(receiver, [first, first, second, first, second]) == [0, 1]
    assert (receiver.stats.received, receiver.stats.doubled, receiver.stats.missing) == (2, 3, 0)


def test_a_message_that_comes_behind_a_later_one_is_dropped() -> None:
    receiver = Tracker()
    frames = closes(Tracker(), 4)
    assert handles(receiver, [frames[0], frames[3], frames[1], frames[2]]) == [0, 3]
    assert (receiver.stats.missing, receiver.stats.doubled) == (2, 2)


def test_messages_that_never_come_are_counted() -> None:
    receiver = Tracker()
    frames = closes(Tracker(), 10)
    assert handles(receiver, frames[2:4] + frames[7:]) == [2, 3, 7, 8, 9]
    assert receiver.stats.missing == 5


def test_an_end_that_comes_back_is_noticed_and_counts_from_0_again() -> None:
    receiver = Tracker()
    former, latter = closes(Tracker(), 5), closes(Tracker(), 3)
    assert handles(receiver, former + latter) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert (receiver.stats.sessions, receiver.stats.missing, receiver.stats.doubled) == (2, 0, 0)


def test_what_is_left_of_a_former_session_is_no_restart() -> None:
    receiver = Tracker()
    former, latter = closes(Tracker(), 5), closes(Tracker(), 3)
    assert handles(receiver, [*former[:2], latter[0], *former[2:], *latter[1:]]) == [0, 1, 0, 1, 2]
    assert (receiver.stats.sessions, receiver.stats.doubled) == (2, 3)


def test_a_message_that_breaks_a_limit_uses_up_no_number() -> None:
    sender, receiver = Tracker(), Tracker()
    with pytest.raises(MessageError):
        sender.seal(replace(CLOSE, handle=-1))
    assert handles(receiver, closes(sender, 1)) == [0]
    assert receiver.stats.missing == 0


def test_what_is_malformed_is_counted_and_logged_once_per_fault(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Tracker()
    with caplog.at_level(logging.WARNING, "vllm.specrollout"):
        for number in range(50):
            assert not receiver.unseal([b"x" * number])  # two faults: too short, then no magic
            assert not receiver.unseal([sealed(99, bytes(number))])
    assert receiver.stats.malformed == 100
    assert len(caplog.records) == 3
    assert "kinds are 1 to 7" in caplog.text


def trees(tracker: Tracker, *handles: int) -> list[bytes]:
    """The bytes of a tree for each of these, as one end sends them."""
    return [tracker.seal(replace(DRAFTS, handle=handle)) for handle in handles]


def told(messages: list[Message]) -> list[tuple[str, int]]:
    return [(type(message).__name__, message.handle) for message in messages if isinstance(message, Drafts | Close)]


def test_of_a_requests_trees_that_come_together_the_newest_comes_alone() -> None:
    sender, receiver = Tracker(), Tracker()
    frames = [*trees(sender, 1, 2, 1), sender.seal(CLOSE), *trees(sender, 1, 3)]
    found = receiver.unseal(frames)
    assert told(found) == [("Drafts", 2), ("Close", CLOSE.handle), ("Drafts", 1), ("Drafts", 3)]
    stats = receiver.stats
    assert (stats.received, stats.superseded, stats.missing, stats.doubled) == (4, 2, 0, 0)
    assert told(receiver.unseal(trees(sender, 1))) == [("Drafts", 1)]


def test_a_tree_that_comes_behind_a_newer_one_takes_its_place_in_no_way() -> None:
    receiver = Tracker()
    first, second, third = trees(Tracker(), 1, 1, 1)
    assert told(receiver.unseal([second, first, second])) == [("Drafts", 1)]
    assert (receiver.stats.received, receiver.stats.doubled, receiver.stats.superseded) == (1, 2, 0)
    assert receiver.unseal([third]), "its number is not used up"


def test_what_is_no_whole_tree_takes_no_trees_place() -> None:
    sender, receiver = Tracker(), Tracker()
    (tree,) = trees(sender, 1)
    none = np.zeros(0, np.int32)
    question = sender.seal(Drafts(1, 0, 0, none, none, np.zeros(0, np.float32)))
    (cut,) = trees(sender, 1)
    former = trees(Tracker(), 1)
    found = receiver.unseal([*former, tree, question, cut[:-1]])
    assert [len(message.token_ids) for message in found if isinstance(message, Drafts)] == [
        len(DRAFTS.token_ids),  # of a former session
        len(DRAFTS.token_ids),
        0,
    ]
    assert (receiver.stats.sessions, receiver.stats.malformed, receiver.stats.superseded) == (2, 1, 0)


def test_thousands_of_restarts_take_no_more_memory_than_a_few() -> None:
    receiver = Tracker()
    for session in range(5000):
        assert receiver.unseal([encode(BEAT, session, 0)])
    assert receiver.stats.sessions == 5000
    assert len(receiver._retired) < 100


def damaged(frame: bytes, draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return frame[: draw(st.integers(0, len(frame) - 1))]
    bit = draw(st.integers(0, 8 * len(frame) - 1))
    return frame[: bit // 8] + bytes([frame[bit // 8] ^ 1 << bit % 8]) + frame[bit // 8 + 1 :]


@st.composite
def deliveries(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Messages of one session as a bad network delivers them: number, or -1 where it is damaged, and bytes."""
    frames = closes(Tracker(), draw(st.integers(1, 12)))
    arrived = []
    for number in draw(st.lists(st.integers(0, len(frames) - 1), max_size=30)):
        is_damaged = draw(st.integers(0, 3)) == 0
        arrived.append((-1, damaged(frames[number], draw)) if is_damaged else (number, frames[number]))
    return arrived


@given(deliveries())
def test_whatever_a_network_does_each_message_comes_once_and_in_order(arrived: list[tuple[int, bytes]]) -> None:
    receiver = Tracker()
    expected: list[int] = []
    for number, _ in arrived:
        if number > max(expected, default=-1):
            expected.append(number)
    assert handles(receiver, [frame for _, frame in arrived]) == expected
    stats = receiver.stats
    assert stats.malformed == sum(number < 0 for number, _ in arrived)
    assert stats.received + stats.doubled + stats.malformed == len(arrived)
    assert stats.received + stats.missing == max(expected, default=-1) + 1


@given(st.lists(st.binary(max_size=200) | st.sampled_from([encode(m, 1, 0) for m in ONE_OF_EACH]), max_size=40))
def test_whatever_arrives_good_messages_still_get_through(noise: list[bytes]) -> None:
    receiver = Tracker()
    for frame in noise:
        receiver.unseal([frame])
    assert receiver.unseal([Tracker().seal(CLOSE)]) == [CLOSE]
