"""Messages between a verifying engine and a drafter in another process: frozen carriers, and what is wrong in them.

May enter: kinds of messages, their limits and checks. May not: bytes (codec.py) and transports (mailbox.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.errors import SpecRolloutError
from vllm_specrollout.types import ROOT, FloatArray, IntArray

SeedArray = npt.NDArray[np.int64]

MAX_TOKENS = 1 << 18
"""Token ids in one message: twice the longest context that models of today are trained for."""
MAX_SEEDS = 1 << 15
"""Seeds in one message: noise of the positions to come, not of a whole answer."""
MAX_NODES = 4096
"""Nodes in one `Drafts`. A verifier takes 64 a step; a window with exits behind each level is longer."""
MAX_REASON = 1024
"""Bytes of UTF-8 in `Bye.reason`."""
MAX_DETAILS = 1 << 16
"""Bytes of JSON in `Hello.details`."""


class Fault(Enum):
    """What was wrong with a message. A small set, so that a log with one line for each stays small."""

    SIZE = "size"  # cut off, too long, or not as long as it says
    MAGIC = "magic"  # not one of our messages
    VERSION = "version"  # of another version of the protocol
    CHECKSUM = "checksum"  # damaged
    KIND = "kind"  # of a kind that does not exist
    COUNT = "count"  # more tokens, seeds, nodes or text than a message may have, or not as many as belong together
    VALUE = "value"  # a number outside its range, NaN or infinity
    TEXT = "text"  # no UTF-8, or no JSON
    TREE = "tree"  # a parent that does not come before its child
    VOCABULARY = "vocabulary"  # a token id outside the vocabulary


_HINT = "run the same version of vllm-specrollout at both ends, and nothing else at this address"


class MessageError(SpecRolloutError):
    """A message cannot be used, or cannot be sent as it is."""

    def __init__(self, fault: Fault, cause: str, hint: str = _HINT) -> None:
        self.fault = fault
        super().__init__(cause, hint)


class Role(IntEnum):
    """Which end speaks. The numbers are those of the binary form."""

    VERIFIER = 1
    DRAFTER = 2


class Noise(IntEnum):
    """What seeds are. The numbers are those of the binary form."""

    NONE = 0  # there are none
    TAPE = 1  # one 64-bit integer per position (V1 on CPU)
    COUNTER = 2  # one 64-bit seed per request; place and token do the rest (V2), by the hash that `Hello.details` names


class Pace(IntEnum):
    """How far a stream may go without an answer. The numbers are those of the binary form."""

    COUPLED = 0  # to the end of its window, whose verdict is waited for
    DECOUPLED = 1  # one window further


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each end: what it is, and what it can hold."""

    role: Role
    vocab_size: int  # u32
    noise: Noise
    max_requests: int  # u32: open at once, at most
    max_tokens: int  # u32: of one request, prompt included, at most
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON; names of models, versions


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """Verifier: draft for this request from now on, or, where the handle is known, from these tokens on."""

    handle: int  # u64: the verifier's name for the request, never given out twice in a session
    generation: int  # u32: goes up whenever tokens that were drafted on no longer hold
    # [n] int32: prompt and output so far
    token_ids: IntArray
    # [s] int64: noise of the positions n, n+1, ...; with `Noise.COUNTER` the one seed; with `Noise.NONE` empty
    seeds: SeedArray
    temperature: float  # 0: greedy
    top_k: int  # u32; 0: all
    top_p: float
    min_p: float
    max_tokens: int  # u32: that the request may still get, at most
    window: int  # u16: tokens of a window
    fan_out: int  # u16: tokens sent for each position: the stream's own, and exits beside it
    pace: Pace = Pace.DECOUPLED


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Verifier: the request's tokens now."""

    handle: int  # u64
    generation: int  # u32
    num_tokens: int  # u32: that hold now, prompt included
    # [k] int32: the last k of them
    token_ids: IntArray
    # [s] int64: noise of the positions first_seed, first_seed+1, ...; or as in `Open`
    seeds: SeedArray
    first_seed: int  # u32
    # those of the request from now on
    window: int  # u16
    fan_out: int  # u16
    pace: Pace = Pace.DECOUPLED


@dataclass(frozen=True, slots=True)
class Close:
    """Verifier: the request is over, or drafted for elsewhere."""

    handle: int  # u64


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafter: a draft tree. Its first chain is the stream, what branches off are exits.

    One without nodes asks whether the request is still drafted for; where it is not, the answer is `Close`.
    """

    handle: int  # u64
    generation: int  # u32: of the last `Open` or `Verdict` that the drafter followed
    position: int  # u32: of depth 1: how many tokens stand before it
    # [m] int32: drafted tokens
    token_ids: IntArray
    # [m] int32: node -> index of its parent, which is smaller; ROOT for depth 1
    parents: IntArray
    # [m] float32: natural log of the probability that the node is accepted given that its parent is; at most 0
    log_q: FloatArray


@dataclass(frozen=True, slots=True)
class Beat:
    """Drafter: it lives."""

    busy_ms: float  # f32: spent on drafts since its last beat
    drafted: int  # u64: tokens since it started
    # u32, since its last beat: passes, streams in them, and nodes that they looked at
    passes: int = 0
    streams: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """Either end: it leaves in order. The text is the other end's: log it with `%r`."""

    reason: str


Message = Hello | Open | Verdict | Close | Drafts | Beat | Bye

# numbers whose range is narrower than their type's
_RANGES = {"temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "busy_ms": (0.0, math.inf)}
_MOST = {"token_ids": MAX_TOKENS, "seeds": MAX_SEEDS, "parents": MAX_NODES, "log_q": MAX_NODES}
_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {"token_ids": np.int32, "seeds": np.int64, "parents": np.int32, "log_q": np.float32}.items()
}
_PLACES = np.arange(MAX_NODES, dtype=np.int32)
# kind -> its numbers with a range, and its arrays; looked up for each message
_CHECKED: Mapping[type[Message], tuple[tuple[str, ...], tuple[str, ...]]] = {
    kind: (tuple(_RANGES.keys() & kind.__slots__), tuple(name for name in _DTYPES if name in kind.__slots__))
    for kind in (Hello, Open, Verdict, Close, Drafts, Beat, Bye)
}


def most(message_type: type[Message], name: str) -> int:
    """Entries that an array of a message may have."""
    return MAX_NODES if message_type is Drafts else _MOST[name]


def validate(message: Message) -> None:
    """Refuse a message whose numbers do not make sense, whoever made it. Integers are checked by their types alone.

    Raises:
        MessageError: an array of another type or too long, a number out of range, or a tree that is none.
    """
    numbers, arrays = _CHECKED[type(message)]
    for name in numbers:
        _check_real(message, name, *_RANGES[name])
    if not isinstance(message, (Open, Verdict, Drafts)):
        return
    for name in arrays:
        _check_array(message, name, getattr(message, name))
    if len(message.token_ids) and message.token_ids.min() < 0:
        raise _error(message, Fault.VOCABULARY, f"has token id {message.token_ids.min()}, below 0")
    if isinstance(message, Open) and not len(message.token_ids):
        raise _error(message, Fault.COUNT, "has no tokens; a request has at least 1")
    if isinstance(message, Verdict) and len(message.token_ids) > message.num_tokens:
        what = f"brings {len(message.token_ids)} tokens of a request that has {message.num_tokens}"
        raise _error(message, Fault.COUNT, what)
    if isinstance(message, Drafts):
        _check_tree(message)


def _check_real(message: Message, name: str, low: float, high: float) -> None:
    value = getattr(message, name)
    # a nucleus of nothing would leave no token to sample
    if not (math.isfinite(value) and low <= value <= high) or (name == "top_p" and value == 0.0):
        raise _error(message, Fault.VALUE, f"has `{name}` {value}, outside {low:g} to {high:g}")


def _check_array(message: Message, name: str, array: Any) -> None:
    dtype = _DTYPES[name]
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype} of {array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
        raise _error(message, Fault.VALUE, f"has `{name}` as {found}, not {dtype} of 1", "convert it first")
    if len(array) > most(type(message), name):
        raise _error(message, Fault.COUNT, f"has {len(array)} `{name}`, above {most(type(message), name)}")


def _check_tree(message: Drafts) -> None:
    size = len(message.token_ids)
    if not size == len(message.parents) == len(message.log_q):
        what = f"has {size} tokens, {len(message.parents)} parents and {len(message.log_q)} probabilities"
        raise _error(message, Fault.COUNT, what)
    if not size:
        return
    is_wrong = (message.parents < ROOT) | (message.parents >= _PLACES[:size])
    if is_wrong.any():
        node = int(is_wrong.argmax())
        what = f"has node {node} below node {message.parents[node]}; parents come before children"
        raise _error(message, Fault.TREE, what)
    # written so that NaN is refused, too
    is_fine = (message.log_q <= 0.0) & (message.log_q > -np.inf)
    if not is_fine.all():
        value = message.log_q[int(is_fine.argmin())]
        raise _error(message, Fault.VALUE, f"has `log_q` {value}, which is not finite or above 0")


def _error(message: Message, fault: Fault, what: str, hint: str = _HINT) -> MessageError:
    return MessageError(fault, f"a {type(message).__name__} message {what}", hint)
