"""Messages between an engine and the drafters that run elsewhere: one each step, for all requests of the batch. Pure.

What belongs here: what is said, and what is wrong with what was said. How it travels is in mail.py. Arrays travel as
bytes, little-endian, so a message costs the same for one request and for many.

An engine says `Hello`, then `VerifierUpdate` with each step; a drafter answers `Hello`, then says `DraftUpdate` with
each pass. Either end forgets the other's requests when it hears a `Hello`: it has begun anew. The engine whose memory a
drafter shares says `Rest`, and hears the same once it is so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.types import IntArray

VERSION = 6
MOST_REQUESTS = 4096
"""Requests in one message."""
MOST_TOKENS = 1 << 20
"""Tokens in one message: of the new requests of a step, and of the others what is new."""
MOST_TREE = 1 << 18
"""Nodes in one message: 64 for each of its requests."""

_Array = TypeVar("_Array", IntArray, npt.NDArray[np.int64])
_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Handle = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Window = Annotated[int, Meta(ge=1, le=64)]
_FanOut = Annotated[int, Meta(ge=1, le=8)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Ms = Annotated[float, Meta(ge=0.0, le=1e9)]
_Text = Annotated[str, Meta(max_length=1024)]
_Tokens = Annotated[bytes, Meta(max_length=4 * MOST_TOKENS)]
_Nodes = Annotated[bytes, Meta(max_length=4 * MOST_TREE)]
_EachLong = Annotated[bytes, Meta(max_length=8 * MOST_REQUESTS)]
_Each = Annotated[bytes, Meta(max_length=4 * (MOST_REQUESTS + 1))]


class MessageError(SpecRolloutError):
    """A message cannot be used, or cannot be sent as it is."""

    def __init__(
        self,
        cause: str,
        hint: str = "run the same version of vllm-specrollout at both ends, and nothing else at this address",
    ) -> None:
        super().__init__(cause, hint)


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Either end: it is here, and knows nothing of what was said before."""

    version: _Count
    vocab_size: _Count
    # of a drafter: what drafts, by its folder or name, and on what
    model: _Text = ""
    device: _Text = ""


class Sampling(Struct, frozen=True, array_like=True):
    """How a request's tokens are chosen, as far as a drafter follows it."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e4)]  # 0: the best token is taken
    top_k: _Count = 0  # 0: all
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: _Share = 0.0
    # of its noise; None: nobody else can draw it
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None

    @property
    def has_noise(self) -> bool:
        return self.seed is not None and self.temperature > 0.0


class Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """An engine: draft for this request from now on."""

    handle: _Handle  # the engine's name for it, never given out twice
    token_ids: _Tokens  # int32: prompt, and answer so far
    prompt_tokens: _Count
    sampling: Sampling
    max_tokens: _Count  # that it may still get
    window: _Window


class VerifierUpdate(Struct, frozen=True, array_like=True, tag="told"):
    """An engine, each step: how its requests stand. Those that it says nothing of stand as they did."""

    fan_out: _FanOut
    opened: Annotated[tuple[Opened, ...], Meta(max_length=MOST_REQUESTS)]
    closed: _EachLong  # [.] int64 handles of those that are over
    handles: _EachLong  # [n] int64, of requests with new tokens
    counts: _Each  # [n] int32: how many
    token_ids: _Tokens  # [sum(counts)] int32
    window: _Window  # of all of these from now on


class Work(Struct, frozen=True, array_like=True):
    """What a drafter did for an engine in a while."""

    busy_ms: _Ms = 0.0  # for all its engines
    passes: _Count = 0
    streams: _Count = 0  # summed over passes: requests in them
    # tokens of this engine's requests: of streams, and of these behind misses
    drafted: _Count = 0
    wasted: _Count = 0

    def __add__(self, other: Work) -> Work:
        busy_ms, passes, streams = (
            self.busy_ms + other.busy_ms,
            self.passes + other.passes,
            self.streams + other.streams,
        )
        return Work(busy_ms, passes, streams, self.drafted + other.drafted, self.wasted + other.wasted)

    def __sub__(self, other: Work) -> Work:
        busy_ms, passes, streams = (
            self.busy_ms - other.busy_ms,
            self.passes - other.passes,
            self.streams - other.streams,
        )
        return Work(busy_ms, passes, streams, self.drafted - other.drafted, self.wasted - other.wasted)


class DraftUpdate(Struct, frozen=True, array_like=True, tag="drafted"):
    """A drafter, each pass: the whole trees of requests for which there is something new, and the pass's work."""

    handles: _EachLong  # [n] int64
    positions: _Each  # [n] int32: tokens that stand before depth 1
    node_start: _Each  # [n + 1] int32
    token_ids: _Nodes  # [nodes] int32
    parents: _Nodes  # [nodes] int32: index within the tree of the parent, which comes before; -1: depth 1
    ranks: Annotated[bytes, Meta(max_length=MOST_TREE)]  # [nodes] uint8: place among the parent's choices, best first
    log_q: _Nodes  # [nodes] float32: log of the probability that it is accepted where its parent is; at most 0
    work: Work = Work()  # since the last one


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """Either end: it leaves in order. The text is the other end's: log it with `%r`."""

    reason: _Text


class Rest(Struct, frozen=True, array_like=True, tag="rest"):
    """An engine: give your memory back, or take it again. A drafter: that is done."""

    is_asleep: bool


Message = Hello | VerifierUpdate | DraftUpdate | Bye | Rest
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)
MOST_BYTES = 8 << 20
"""Of a message: what may be longer is cut into several by whoever sends it."""


def encode(message: Struct) -> bytes:
    """
    Raises:
        MessageError: it is too long to be sent.
    """
    data = _encoder.encode(message)
    if len(data) > MOST_BYTES:
        raise MessageError(f"a message of {len(data)} bytes, above {MOST_BYTES}", "draft for fewer requests at once")
    return data


def decode(data: bytes) -> Message:
    """
    Raises:
        MessageError: these bytes are no message, or its arrays do not belong together.
    """
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes are no message: {str(error)[:200]}") from None
    if isinstance(message, VerifierUpdate):
        _check_told(message)
    # the core looks at the arrays of `DraftUpdate` itself
    return message


def _check_told(told: VerifierUpdate) -> None:
    handles, counts = _array(told, "handles", longs), _array(told, "counts", ints)
    _array(told, "closed", longs)
    tokens, each = _array(told, "token_ids", ints), [_array(one, "token_ids", ints) for one in told.opened]
    if len(handles) != len(counts):
        raise MessageError("a message has arrays of other lengths: handles, counts")
    if (counts < 1).any() or int(counts.sum(dtype=np.int64)) != len(tokens):
        raise MessageError(f"a message brings {len(tokens)} tokens, and counts others")
    if any(not 0 < one.prompt_tokens <= len(own) for one, own in zip(told.opened, each, strict=True)):
        raise MessageError("a message opens a request without a prompt")
    if any(len(own) and own.min() < 0 for own in (*each, tokens)):
        raise MessageError("a message has a token below 0")


def _array(message: VerifierUpdate | Opened, name: str, read: Callable[[bytes], _Array]) -> _Array:
    try:
        return read(getattr(message, name))
    except ValueError as error:
        raise MessageError(f"a message has half a number in `{name}`: {error}") from None


def longs(data: bytes) -> npt.NDArray[np.int64]:
    """[n] int64, not to be written to."""
    return np.frombuffer(data, "<i8")


def ints(data: bytes) -> IntArray:
    """[n] int32, not to be written to."""
    return np.frombuffer(data, "<i4")
