"""Bytes of messages: what is sent comes back, and nothing else does."""

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.builders import (
    BEAT,
    BYE,
    CLOSE,
    DRAFTS,
    HELLO,
    ONE_OF_EACH,
    OPEN,
    U64,
    VERDICT,
    any_message,
    is_same,
    sealed,
)
from vllm_specrollout.cluster.codec import HEADER, MAX_MESSAGE, VERSION, encode, opened
from vllm_specrollout.cluster.messages import (
    MAX_DETAILS,
    MAX_NODES,
    MAX_REASON,
    MAX_SEEDS,
    MAX_TOKENS,
    Drafts,
    Fault,
    Message,
    MessageError,
)

each_kind = pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
KIND = {type(message).__name__: encode(message, 0, 0)[6] for message in ONE_OF_EACH}


def refusal(data: bytes) -> MessageError:
    with pytest.raises(MessageError) as caught:
        opened(data).message()
    return caught.value


def payload(message: Message) -> bytes:
    return encode(message, 1, 0)[HEADER.size :]


@given(any_message, U64, U64)
def test_what_is_sent_comes_back(message: Message, session: int, number: int) -> None:
    found = opened(encode(message, session, number))
    assert (found.session, found.number) == (session, number)
    assert is_same(found.message(), message)


@each_kind
def test_a_decoded_message_has_memory_of_its_own(message: Message) -> None:
    data = bytearray(encode(message, 1, 2))
    found = opened(memoryview(data)).message()
    data[:] = bytes(len(data))
    assert is_same(found, message)


@each_kind
def test_a_message_cut_off_anywhere_is_refused(message: Message) -> None:
    data = encode(message, 1, 2)
    assert {refusal(data[:end]).fault for end in range(len(data))} == {Fault.SIZE}


@each_kind
def test_bytes_behind_a_message_are_refused(message: Message) -> None:
    assert refusal(encode(message, 1, 2) + b"\0").fault is Fault.SIZE
    assert refusal(sealed(KIND[type(message).__name__], payload(message) + b"\0")).fault is Fault.SIZE


@each_kind
def test_a_payload_cut_off_is_refused_even_if_its_checksum_is_right(message: Message) -> None:
    whole = payload(message)
    for end in range(len(whole)):
        assert refusal(sealed(KIND[type(message).__name__], whole[:end])).fault is Fault.SIZE


@each_kind
def test_a_flipped_bit_anywhere_is_refused(message: Message) -> None:
    data = encode(message, 1, 2)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        field = {0: Fault.MAGIC, 4: Fault.VERSION, 24: Fault.SIZE}
        starts = [start for start in (0, 4, 6, 24, 28) if start <= bit // 8]
        assert refusal(bytes(damaged)).fault is field.get(starts[-1], Fault.CHECKSUM)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refusal(data).fault in (Fault.SIZE, Fault.MAGIC)


@given(st.integers(0, 255), st.binary(max_size=300))
def test_a_hostile_payload_is_a_message_or_refused(kind: int, data: bytes) -> None:
    assert_harmless(sealed(kind, data))


@given(any_message, st.data())
def test_a_payload_that_was_tampered_with_is_a_message_or_refused(message: Message, data: st.DataObject) -> None:
    changed = bytearray(payload(message))
    if changed:
        at = data.draw(st.integers(0, len(changed) - 1))
        new = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(new)] = new
    assert_harmless(sealed(KIND[type(message).__name__], bytes(changed)))


def assert_harmless(data: bytes) -> None:
    try:
        found = opened(data).message()
    except MessageError as error:
        assert len(str(error)) < 500
    else:
        assert is_same(opened(encode(found, 1, 0)).message(), found)


@pytest.mark.parametrize("version", [1, VERSION + 1])
def test_another_version_is_refused_and_both_are_named(version: int) -> None:
    error = refusal(sealed(KIND["Close"], payload(CLOSE), version=version))
    assert error.fault is Fault.VERSION
    assert error.cause == f"a message of protocol version {version}; this end speaks {VERSION}"
    assert "same version" in error.hint


def test_a_kind_that_does_not_exist_is_refused() -> None:
    assert refusal(sealed(0, b"")).fault is refusal(sealed(8, b"")).fault is Fault.KIND


@pytest.mark.parametrize("length", [0, 7, 9, 2**31, 2**32 - 1])
def test_a_wrong_length_in_the_header_is_refused(length: int) -> None:
    assert refusal(sealed(KIND["Close"], payload(CLOSE), length=length)).fault is Fault.SIZE


def test_more_bytes_than_any_message_has_are_refused_unread() -> None:
    assert refusal(bytes(MAX_MESSAGE + 1)).fault is Fault.SIZE


@pytest.mark.parametrize("message", [OPEN, VERDICT, DRAFTS, HELLO, BYE], ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("count", [2**32 - 1, 2**31, 2**20, 4096])
def test_a_claimed_count_takes_no_memory(message: Message, count: int) -> None:
    whole, kind = payload(message), KIND[type(message).__name__]
    numbers = {"Open": 49, "Verdict": 25, "Drafts": 16, "Hello": 14, "Bye": 0}[type(message).__name__]
    data = sealed(kind, whole[:numbers] + struct.pack("<I", count) + whole[numbers + 4 :])
    tracemalloc.start()
    assert refusal(data).fault in (Fault.COUNT, Fault.SIZE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (replace(CLOSE, handle=-1), "`handle` -1, outside 0 to 18446744073709551615"),
        (replace(CLOSE, handle=2**64), "`handle` 18446744073709551616"),
        (replace(OPEN, generation=-1), "`generation` -1, outside 0 to 4294967295"),
        (replace(OPEN, top_k=-1), "`top_k` -1"),
        (replace(OPEN, max_tokens=-7), "`max_tokens` -7"),
        (replace(OPEN, window=65_536), "`window` 65536, outside 0 to 65535"),
        (replace(OPEN, fan_out=-1), "`fan_out` -1"),
        (replace(VERDICT, num_tokens=2**32), "`num_tokens` 4294967296"),
        (replace(VERDICT, first_seed=-1), "`first_seed` -1"),
        (replace(DRAFTS, position=-1), "`position` -1"),
        (replace(DRAFTS, position=1.5), "`position` 1.5"),
        (replace(HELLO, vocab_size=-1), "`vocab_size` -1"),
        (replace(BEAT, busy_ms=1e300), "`busy_ms` 1e+300, outside the numbers of 32 bits"),
        (replace(BEAT, drafted=-1), "`drafted` -1"),
    ],
)
def test_a_number_out_of_range_cannot_be_sent(message: Message, words: str) -> None:
    with pytest.raises(MessageError) as caught:
        encode(message, 1, 0)
    assert caught.value.fault is Fault.VALUE and words in caught.value.cause


@pytest.mark.parametrize(("at", "value"), [(0, 0), (0, 3), (1, 3), (1, 255)])
def test_a_role_or_noise_that_does_not_exist_is_refused(at: int, value: int) -> None:
    changed = bytearray(payload(HELLO))
    changed[at] = value
    error = refusal(sealed(KIND["Hello"], bytes(changed)))
    assert error.fault is Fault.VALUE and f"{value}, which is none of" in error.cause


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [12, 24, 32])
def test_floats_that_are_no_numbers_are_refused(at: int, value: float) -> None:
    changed = bytearray(payload(OPEN))
    struct.pack_into("<d", changed, at, value)
    assert refusal(sealed(KIND["Open"], bytes(changed))).fault is Fault.VALUE


def test_a_tree_that_is_none_is_refused_although_its_checksum_is_right() -> None:
    changed = bytearray(payload(DRAFTS))
    # numbers 16, count 4, four tokens, count 4, then parents: the second node's is to be itself
    struct.pack_into("<i", changed, 16 + 4 + 16 + 4 + 4, 1)
    assert refusal(sealed(KIND["Drafts"], bytes(changed))).fault is Fault.TREE


def hello_with(text: bytes) -> bytes:
    return sealed(KIND["Hello"], payload(HELLO)[:14] + struct.pack("<I", len(text)) + text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b"[1]",
        b"null",
        b"",
        b"{",
        b"\xff",
        b'{"a":' + b"[" * 60_000,
        b'{"a":' + b"9" * 60_000 + b"}",
    ],
    ids=lambda text: text[:12],
)
def test_details_that_are_no_plain_json_object_are_refused(text: bytes) -> None:
    error = refusal(hello_with(text))
    assert error.fault is Fault.TEXT and len(str(error)) < 500


@pytest.mark.parametrize("details", [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {"a": b"x"}])
def test_details_that_are_no_plain_json_cannot_be_sent(details: dict) -> None:
    with pytest.raises(MessageError) as caught:
        encode(replace(HELLO, details=details), 1, 0)
    assert caught.value.fault is Fault.TEXT


@pytest.mark.parametrize(
    "message", [replace(BYE, reason="x" * (MAX_REASON + 1)), replace(HELLO, details={"a": "x" * MAX_DETAILS})]
)
def test_longer_texts_than_allowed_cannot_be_sent(message: Message) -> None:
    with pytest.raises(MessageError) as caught:
        encode(message, 1, 0)
    assert caught.value.fault is Fault.COUNT


def test_a_reason_that_is_no_text_is_refused() -> None:
    assert refusal(sealed(KIND["Bye"], struct.pack("<I", 2) + b"\xc3\x28")).fault is Fault.TEXT


def test_the_longest_message_of_each_kind_is_within_the_limit() -> None:
    tokens, noise = np.zeros(MAX_TOKENS, np.int32), np.zeros(MAX_SEEDS, np.int64)
    nodes = np.arange(MAX_NODES, dtype=np.int32)
    for message in (
        replace(OPEN, token_ids=tokens, seeds=noise),
        replace(VERDICT, num_tokens=MAX_TOKENS, token_ids=tokens, seeds=noise),
        Drafts(1, 1, 1, nodes, nodes - 1, np.zeros(MAX_NODES, np.float32)),
        replace(HELLO, details={"a": "x" * (MAX_DETAILS - 8)}),
        replace(BYE, reason="x" * MAX_REASON),
    ):
        data = encode(message, 1, 0)
        assert len(data) <= MAX_MESSAGE
        assert is_same(opened(data).message(), message)
