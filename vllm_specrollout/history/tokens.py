"""Token ids as few bytes: `encode_tokens` and `decode_tokens`. Nothing about records or files.

Two encodings are tried and the smaller is kept. Packed bits bound the size whatever the tokens are: 18 bits each for a
vocabulary of 150 k. Byte planes under zlib win where tokens repeat or are mostly small.
"""

from __future__ import annotations

import zlib

import numpy as np

from vllm_specrollout.types import IntArray

MAX_TOKENS = 1 << 22
"""Most tokens of one answer. A count above it is damage, and nothing is allocated for it."""

_PLANES = 0x80
# zlib cannot expand further than this, so a count that asks for more is damage
_MOST_EXPANSION = 1040


def encode_tokens(token_ids: IntArray) -> bytes:
    """Encode token ids.

    Args:
        token_ids: [num_tokens] int32, at most `MAX_TOKENS`; any value, negative ones too.

    Returns:
        One byte of encoding and width, the count as a varint, the body. At most `bits / 8` bytes per token and a few,
        where `bits` is the width of the largest id.
    """
    values = np.ascontiguousarray(token_ids, dtype=np.int32).view(np.uint32)
    if values.size > MAX_TOKENS:
        raise ValueError(f"{values.size} tokens, above the {MAX_TOKENS} that one answer may have")
    width = max(1, int(values.max(initial=0)).bit_length())
    packed, planes = _pack(values, width), _squeeze(values, width)
    if len(planes) < len(packed):
        return bytes([_PLANES | width]) + _varint(values.size) + planes
    return bytes([width]) + _varint(values.size) + packed


def decode_tokens(data: bytes) -> IntArray:
    """The token ids of `encode_tokens`: [num_tokens] int32.

    Raises:
        ValueError: the bytes are not such an encoding. Never more than their count is allocated, nor that beyond
            what so many bytes can hold. What is well-formed but not what was written, a checksum has to find.
    """
    if not data:
        raise ValueError("no bytes")
    width = data[0] & ~_PLANES
    count, start = _read_varint(data)
    body = memoryview(data)[start:]
    if not 1 <= width <= 32 or count > MAX_TOKENS:
        raise ValueError(f"{count} tokens of {width} bits cannot be")
    if not data[0] & _PLANES:
        return _unpack(body, width, count)
    return _expand(body, width, count)


def count_tokens(data: bytes) -> int:
    """How many tokens an encoding says it holds; its first 8 bytes are enough.

    Raises:
        ValueError: it says nothing, or more than an answer may have.
    """
    count, _ = _read_varint(data)
    if count > MAX_TOKENS:
        raise ValueError(f"{count} tokens, above the {MAX_TOKENS} that one answer may have")
    return count


def _pack(values: np.ndarray, width: int) -> bytes:
    bits = np.unpackbits(values.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)[:, 32 - width :]
    return np.packbits(bits).tobytes()


def _unpack(body: memoryview, width: int, count: int) -> IntArray:
    if len(body) != -(-count * width // 8):
        raise ValueError(f"{len(body)} bytes for {count} tokens of {width} bits")
    bits = np.zeros((count, 32), np.uint8)
    bits[:, 32 - width :] = np.unpackbits(np.frombuffer(body, np.uint8), count=count * width).reshape(count, width)
    return np.packbits(bits, axis=1).view(">u4").ravel().astype(np.uint32).view(np.int32)


def _squeeze(values: np.ndarray, width: int) -> bytes:
    # all lowest bytes, then all second bytes, ...: the high planes are nearly constant and cost next to nothing
    return zlib.compress(values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : -(-width // 8)].T.tobytes(), 1)


def _expand(body: memoryview, width: int, count: int) -> IntArray:
    num_planes = -(-width // 8)
    size = num_planes * count
    if size > _MOST_EXPANSION * len(body) + 64:
        raise ValueError(f"{len(body)} bytes cannot expand to {count} tokens")
    expander = zlib.decompressobj()
    try:
        # never 0, which would mean without limit; one byte more than wanted shows a body that is too long
        planes = expander.decompress(body, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(planes) != size or not expander.eof or expander.unused_data:
        raise ValueError(f"the body is not that of {count} tokens")
    values = np.zeros((count, 4), np.uint8)
    values[:, :num_planes] = np.frombuffer(planes, np.uint8).reshape(num_planes, count).T
    return values.view("<u4").ravel().astype(np.uint32).view(np.int32)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes) -> tuple[int, int]:
    """The count behind the first byte, and where the body starts."""
    value = 0
    for index, byte in enumerate(data[1:6]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 2
    raise ValueError("the count does not end")
