"""Messages: whatever comes in is one of them, or one clear error."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specrollout.cluster import messages
from vllm_specrollout.cluster.messages import DraftUpdate, Hello, MessageError, Sampling, VerifierUpdate, decode, encode


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def longs(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


OPENED = messages.Opened(7, ints(5, 6, 7), 2, Sampling(0.7, 50, 0.9, 0.05, -(2**63)), 512, 4)
TOLD = VerifierUpdate(4, (OPENED,), longs(3), longs(8, 9), ints(2, 1), ints(1, 2, 3), 4)
NODES = (longs(7), ints(9), ints(0, 2), ints(1, 2), ints(-1, 0), b"\0\1", np.float32([-0.1, -2]).tobytes())
DRAFTED = DraftUpdate(*NODES, messages.Work(1.5, 3, 5, 7, 1))
ONE_OF_EACH = (Hello(messages.VERSION, 32_000), TOLD, DRAFTED, messages.Bye("ended, naïvely"))


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_what_is_said_is_what_is_heard(message: messages.Message) -> None:
    assert decode(encode(message)) == message


changed = msgspec.structs.replace


def opening(**given: object) -> VerifierUpdate:
    return changed(TOLD, opened=(changed(OPENED, **given),))


WRONG = {
    "a message that brings other counts of tokens": changed(TOLD, counts=ints(2, 2)),
    "a count of none": changed(TOLD, counts=ints(3, 0)),
    "a window beyond the longest": changed(TOLD, window=65),
    "no window at all": changed(TOLD, window=0),
    "a token below 0": changed(TOLD, token_ids=ints(1, 2, -3)),
    "arrays of other lengths": changed(TOLD, handles=longs(8)),
    "half a number": changed(TOLD, closed=b"\0\0\0"),
    "half a token": opening(token_ids=b"\0" * 13),
    "a fan-out beyond the widest": changed(TOLD, fan_out=9),
    "an opened request without a prompt": opening(prompt_tokens=0),
    "a prompt longer than the request": opening(prompt_tokens=4),
    "a nucleus of nothing": opening(sampling=Sampling(0.7, top_p=0.0)),
    "a temperature that is no number": opening(sampling=Sampling(float("nan"))),
    "a reason as long as a book": messages.Bye("x" * 2000),
}


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_make_no_sense_are_one_clear_error(what: str) -> None:
    with pytest.raises(MessageError, match=r"hint: \S"):
        decode(encode(WRONG[what]))


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_one_clear_error(data: bytes) -> None:
    try:
        message = decode(data)
    except MessageError:
        return
    assert decode(encode(message)) == message


@given(message=st.sampled_from(ONE_OF_EACH), data=st.data())
def test_a_damaged_message_is_another_one_or_one_clear_error(message: messages.Message, data: st.DataObject) -> None:
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        found = decode(bytes(whole[:cut]))
    except MessageError:
        return
    assert type(found) in map(type, ONE_OF_EACH)


def test_an_integer_of_four_hundred_digits_is_no_number_here() -> None:
    text = b"\x94\xa4told" + b"\xda\x01\x90" + b"9" * 400
    with pytest.raises(MessageError):
        decode(text)


def test_a_message_too_long_to_send_is_refused_by_whoever_sends_it() -> None:
    with pytest.raises(MessageError, match="above"):
        encode(DraftUpdate(b"", b"", ints(0), b"\0" * (messages.MOST_BYTES + 1), b"", b"", b""))
