"""Messages as bytes and back. Nothing is read beyond the buffer, and no length is believed before it is checked.

    header   magic 4 | version u16 | kind u8 | 0 | session u64 | number u64 | payload length u32 | crc32 u32
    payload  the kind's numbers | for each of its arrays and texts: count u32, entries

All little-endian. The checksum is over all but itself. A later version keeps magic and version where they are.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specrollout.cluster.messages import (
    MAX_DETAILS,
    MAX_REASON,
    MAX_SEEDS,
    MAX_TOKENS,
    Beat,
    Bye,
    Close,
    Drafts,
    Fault,
    Hello,
    Message,
    MessageError,
    Noise,
    Open,
    Pace,
    Role,
    Verdict,
    most,
    validate,
)

MAGIC = b"SRMB"
VERSION = 2
"""2: `Open` and `Verdict` say whether the stream goes ahead (`pace`)."""
HEADER = struct.Struct("<4sHBBQQII")
_CHECKED = struct.Struct("<4sHBBQQI")  # the header without its checksum
_COUNT = struct.Struct("<I")
MAX_PAYLOAD = 128 + 4 * MAX_TOKENS + 8 * MAX_SEEDS
"""Bytes: an `Open` with all that it may have; other kinds are shorter."""
MAX_MESSAGE = HEADER.size + MAX_PAYLOAD
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message that came whole, and is not read yet."""

    session: int  # u64: drawn at random by each mailbox when it is opened
    number: int  # u64: counts the messages of a session from 0
    kind: type[Message]
    payload: memoryview

    @property
    def tree_of(self) -> int | None:
        """Handle of the request that it brings a draft tree for; None: it brings none."""
        if self.kind is not Drafts or len(self.payload) <= _NO_TREE:
            return None
        handle: int = _HANDLE.unpack_from(self.payload)[0]
        return handle

    def message(self) -> Message:
        """What it says, with arrays of its own.

        Raises:
            MessageError: the payload is not one of its kind, or breaks a limit.
        """
        message = _decode_payload(self.kind, self.payload)
        validate(message)
        return message


@dataclass(frozen=True, slots=True)
class _Layout:
    """One kind's payload."""

    kind: int
    numbers: struct.Struct
    # names of the numbers, then of the arrays, then of the text, in the order in which they are written
    number_names: tuple[str, ...] = ()
    array_names: tuple[str, ...] = ()
    text_name: str = ""
    text_limit: int = 0


_LAYOUTS: dict[type[Message], _Layout] = {
    Hello: _Layout(
        1,
        struct.Struct("<BBIII"),
        ("role", "noise", "vocab_size", "max_requests", "max_tokens"),
        text_name="details",
        text_limit=MAX_DETAILS,
    ),
    Open: _Layout(
        2,
        struct.Struct("<QIdIddIHHB"),
        ("handle", "generation", "temperature", "top_k", "top_p", "min_p", "max_tokens", "window", "fan_out", "pace"),
        ("token_ids", "seeds"),
    ),
    Verdict: _Layout(
        3,
        struct.Struct("<QIIIHHB"),
        ("handle", "generation", "num_tokens", "first_seed", "window", "fan_out", "pace"),
        ("token_ids", "seeds"),
    ),
    Close: _Layout(4, struct.Struct("<Q"), ("handle",)),
    Drafts: _Layout(5, struct.Struct("<QII"), ("handle", "generation", "position"), ("token_ids", "parents", "log_q")),
    Beat: _Layout(6, struct.Struct("<fQIII"), ("busy_ms", "drafted", "passes", "streams", "rows")),
    Bye: _Layout(7, struct.Struct("<"), text_name="reason", text_limit=MAX_REASON),
}
_HANDLE = struct.Struct("<Q")  # the first number of every kind that has one
_NO_TREE = _LAYOUTS[Drafts].numbers.size + 3 * _COUNT.size  # bytes of a `Drafts` without nodes
_TYPES = {layout.kind: cls for cls, layout in _LAYOUTS.items()}
_ENTRIES = {"token_ids": "<i4", "seeds": "<i8", "parents": "<i4", "log_q": "<f4"}
_ENUMS: dict[str, Any] = {"role": Role, "noise": Noise, "pace": Pace}


def encode(message: Message, session: int, number: int) -> bytes:
    """A message's bytes.

    Raises:
        MessageError: the message breaks a limit, or its numbers do not make sense.
    """
    layout = _LAYOUTS[type(message)]
    validate(message)
    try:
        parts = [layout.numbers.pack(*(getattr(message, name) for name in layout.number_names))]
    except (struct.error, OverflowError, TypeError):
        raise _number_error(message, layout) from None
    for name in layout.array_names:
        array = getattr(message, name)
        parts += [_COUNT.pack(len(array)), array.astype(_ENTRIES[name], copy=False).tobytes()]
    if layout.text_name:
        text = _encode_text(message, layout)
        parts += [_COUNT.pack(len(text)), text]
    payload = b"".join(parts)
    head = _CHECKED.pack(MAGIC, VERSION, layout.kind, 0, session, number, len(payload))
    return b"".join((head, _COUNT.pack(zlib.crc32(payload, zlib.crc32(head))), payload))


def opened(data: bytes | bytearray | memoryview) -> Frame:
    """Some bytes as a message that came whole; what it says is read later, or never.

    Raises:
        MessageError: the bytes are damaged, or no message of this version.
    """
    view = memoryview(data).cast("B")
    if not HEADER.size <= len(view) <= MAX_MESSAGE:
        raise MessageError(Fault.SIZE, f"a message of {len(view)} bytes, outside {HEADER.size} to {MAX_MESSAGE}")
    magic, version, kind, _, session, number, length, checksum = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise MessageError(Fault.MAGIC, f"bytes that begin with {magic!r} are no message; one begins with {MAGIC!r}")
    if version != VERSION:
        raise MessageError(Fault.VERSION, f"a message of protocol version {version}; this end speaks {VERSION}")
    payload = view[HEADER.size :]
    if length != len(payload):
        raise MessageError(Fault.SIZE, f"a message says that {length} bytes follow its header; {len(payload)} do")
    if checksum != zlib.crc32(payload, zlib.crc32(view[: _CHECKED.size])):
        raise MessageError(Fault.CHECKSUM, f"a message of {len(view)} bytes is damaged: its checksum is wrong")
    if kind not in _TYPES:
        raise MessageError(Fault.KIND, f"a message of kind {kind}; kinds are 1 to {len(_TYPES)}")
    return Frame(session, number, _TYPES[kind], payload)


def _decode_payload(cls: type[Message], payload: memoryview) -> Message:
    layout = _LAYOUTS[cls]
    if len(payload) < layout.numbers.size:
        cause = f"a {cls.__name__} message of {len(payload)} bytes, below {layout.numbers.size}"
        raise MessageError(Fault.SIZE, cause)
    values: dict[str, Any] = dict(zip(layout.number_names, layout.numbers.unpack_from(payload), strict=True))
    for name in values.keys() & _ENUMS.keys():
        values[name] = _decode_enum(cls, name, values[name])
    rest = payload[layout.numbers.size :]
    for name in layout.array_names:
        dtype = np.dtype(_ENTRIES[name])
        taken, rest = _take(cls, name, rest, dtype.itemsize, most(cls, name))
        values[name] = np.frombuffer(taken, dtype).astype(dtype.newbyteorder("="))
    if layout.text_name:
        taken, rest = _take(cls, layout.text_name, rest, 1, layout.text_limit)
        values[layout.text_name] = _decode_text(cls, layout.text_name, bytes(taken))
    if len(rest):
        raise MessageError(Fault.SIZE, f"a {cls.__name__} message with {len(rest)} bytes behind its end")
    return cls(**values)


def _take(cls: type[Message], name: str, data: memoryview, item_size: int, limit: int) -> tuple[memoryview, memoryview]:
    """The entries that come next, and what follows them."""
    if len(data) < _COUNT.size:
        raise MessageError(Fault.SIZE, f"a {cls.__name__} message ends before its `{name}`")
    count = _COUNT.unpack_from(data)[0]
    if count > limit:
        raise MessageError(Fault.COUNT, f"a {cls.__name__} message has {count} `{name}`, above {limit}")
    end = _COUNT.size + count * item_size
    if end > len(data):
        cause = f"a {cls.__name__} message claims {count} `{name}` in {len(data) - _COUNT.size} bytes"
        raise MessageError(Fault.SIZE, cause)
    return data[_COUNT.size : end], data[end:]


def _decode_enum(cls: type[Message], name: str, value: int) -> Role | Noise:
    try:
        return _ENUMS[name](value)
    except ValueError:
        known = ", ".join(str(int(one)) for one in _ENUMS[name])
        cause = f"a {cls.__name__} message has `{name}` {value}, which is none of {known}"
        raise MessageError(Fault.VALUE, cause) from None


def _encode_text(message: Message, layout: _Layout) -> bytes:
    value = getattr(message, layout.text_name)
    try:
        text = value if layout.text_name == "reason" else json.dumps(value, allow_nan=False, separators=(",", ":"))
        data: bytes = text.encode()
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        cause = f"`{layout.text_name}` of a {type(message).__name__} message cannot be written: {error}"
        raise MessageError(Fault.TEXT, cause, "give plain text, and in `details` plain JSON values") from None
    if len(data) > layout.text_limit:
        cause = f"a {type(message).__name__} message has {len(data)} `{layout.text_name}`, above {layout.text_limit}"
        raise MessageError(Fault.COUNT, cause, "cut it")
    return data


def _decode_text(cls: type[Message], name: str, data: bytes) -> Any:
    try:
        text = data.decode()
        if name == "reason":
            return text
        # Python would read NaN and Infinity, and 1e999 as infinity
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        cause = f"`{name}` of a {cls.__name__} message cannot be read: {str(error)[:80]}"
        raise MessageError(Fault.TEXT, cause) from None
    if not isinstance(value, dict):
        raise MessageError(Fault.TEXT, f"`{name}` of a {cls.__name__} message is a {type(value).__name__}, no object")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not finite")
    return value


def _number_error(message: Message, layout: _Layout) -> MessageError:
    """Which number it was, and what it may be."""
    for code, name in zip(layout.numbers.format[1:], layout.number_names, strict=True):
        value = getattr(message, name)
        try:
            struct.pack(f"<{code}", value)
        except (struct.error, OverflowError, TypeError):
            limit = f"0 to {(1 << 8 * struct.calcsize(code)) - 1}" if code.isupper() else "the numbers of 32 bits"
            cause = f"a {type(message).__name__} message has `{name}` {value!r}, outside {limit}"
            return MessageError(Fault.VALUE, cause, "give a number in this range")
    raise AssertionError("one of the numbers could not be packed")
