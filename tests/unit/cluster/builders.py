"""Messages for tests: one of each kind, any of each kind, and whether two are the same."""

import dataclasses
import struct
import zlib

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vllm_specrollout.cluster.codec import HEADER, MAGIC, VERSION
from vllm_specrollout.cluster.messages import (
    Beat,
    Bye,
    Close,
    Drafts,
    Hello,
    Message,
    Noise,
    Open,
    Pace,
    Role,
    Verdict,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def seeds(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


HELLO = Hello(Role.DRAFTER, 32_000, Noise.TAPE, 64, 4096, {"model": "tiny", "sizes": [1, 2.5, None]})
OPEN = Open(7, 1, ints(5, 6, 7), seeds(-(2**63), 2**63 - 1), 0.7, 50, 0.9, 0.05, 512, 4, 2, Pace.COUPLED)
VERDICT = Verdict(7, 2, 9, ints(8, 9), seeds(11), 9, 4, 2, Pace.COUPLED)
CLOSE = Close(7)
DRAFTS = Drafts(7, 2, 9, ints(1, 2, 3, 4), ints(-1, 0, 0, 2), floats(-0.1, -0.2, -3.0, 0.0))
BEAT = Beat(1.5, 2**40, 3, 5, 7)
BYE = Bye("ended, naïvely")
ONE_OF_EACH: tuple[Message, ...] = (HELLO, OPEN, VERDICT, CLOSE, DRAFTS, BEAT, BYE)

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
TOKENS = hnp.arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 2**31 - 1))
SEEDS = hnp.arrays(np.int64, st.integers(0, 10))
PACES = st.sampled_from(Pace)
SHARES = st.floats(0.0, 1.0)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DETAILS = st.dictionaries(st.text(), JSON, max_size=4)


@st.composite
def drafts(draw: st.DrawFn) -> Drafts:
    size = draw(st.integers(0, 40))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    log_q = draw(hnp.arrays(np.float32, size, elements=st.floats(-(2.0**99), 0.0, width=32)))
    tokens = draw(hnp.arrays(np.int32, size, elements=st.integers(0, 2**31 - 1)))
    return Drafts(draw(U64), draw(U32), draw(U32), tokens, ints(*parents), log_q)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    tokens = draw(TOKENS)
    count = draw(st.integers(len(tokens), 2**32 - 1))
    return Verdict(draw(U64), draw(U32), count, tokens, draw(SEEDS), draw(U32), draw(U16), draw(U16), draw(PACES))


any_message = st.one_of(
    st.builds(
        Hello,
        st.sampled_from(Role),
        U32,
        st.sampled_from(Noise),
        U32,
        U32,
        st.dictionaries(st.text(), JSON, max_size=4),
    ),
    st.builds(
        Open,
        U64,
        U32,
        TOKENS.filter(len),
        SEEDS,
        st.floats(0.0, 1e300),
        U32,
        st.floats(0.0, 1.0, exclude_min=True),
        SHARES,
        U32,
        U16,
        U16,
        PACES,
    ),
    verdicts(),
    st.builds(Close, U64),
    drafts(),
    st.builds(Beat, st.floats(0.0, 2.0**99, width=32), U64, U32, U32, U32),
    st.builds(Bye, st.text(max_size=200)),
)


def is_same(one: Message, other: Message) -> bool:
    """Equal in every field, arrays in type, too."""
    if type(one) is not type(other):
        return False
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


def sealed(kind: int, payload: bytes, version: int = VERSION, length: int | None = None) -> bytes:
    """A message with a right checksum, whatever it says."""
    length = len(payload) if length is None else length
    head = HEADER.pack(MAGIC, version, kind, 0, 1, 0, length, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head))) + payload
