"""Noise that is counted: of a request's seed, a place and a token, as vLLM's V2 runner has it. Pure.

What belongs here: what two ends tell each other of a target's noise, and the noise of some tokens of many rows at once.
The specification, with the sources of both hashes, is kernels/tree_verify/naive.py. A drafter looks at few tokens of a
vocabulary, and at many rows: so here are arrays of tokens, in 32 bits where the hash has 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_specrollout.cluster.messages import Hello, Noise
from vllm_specrollout.types import FloatArray, IntArray

_Words = npt.NDArray[np.uint32]
_Longs = npt.NDArray[np.uint64]
_f32 = np.float32

_BLOCK = 1 << 15
"""Numbers that are computed at once: some 128 KiB an array, so that the hash's thirty passes stay in a core's cache.

Measured with 2,048 tokens a row, in microseconds per row: 52 of 64 rows and 51 of 256, against 103 and 97 where all are
computed at once. Of 17 rows and fewer it is all the same.
"""
_HASH = "hash"  # the key in `Hello.details`


@dataclass(frozen=True, slots=True)
class NoiseKind:
    """What a request's seeds are, and what a token's noise is made of them."""

    noise: Noise
    # of `Noise.COUNTER`: one of `HASHES`
    hash: str = ""

    def __str__(self) -> str:
        return f"`{self.noise.name.lower()}`" + (f" with hash `{self.hash[:20]}`" if self.hash else "")

    @property
    def is_known(self) -> bool:
        """Whether a drafter of this version can meet it."""
        return self.noise is not Noise.COUNTER or self.hash in HASHES

    @property
    def details(self) -> dict[str, Any]:
        """What goes into `Hello.details`."""
        return {_HASH: self.hash} if self.hash else {}

    @classmethod
    def of(cls, hello: Hello) -> NoiseKind:
        """That of the end which says so; what it says may be anything."""
        said = hello.details.get(_HASH) if hello.noise is Noise.COUNTER else ""
        return cls(hello.noise, said if isinstance(said, str) else "")


TAPE = NoiseKind(Noise.TAPE)
"""An integer per position, as vLLM's V1 runner on CPU draws it; all that drafters know until they are told."""


def gumbel(
    hash_name: str, seeds: npt.NDArray[np.int64], places: npt.NDArray[np.int64], token_ids: IntArray
) -> FloatArray:
    """[rows, width] float32 noise, which is added to logits.

    Args:
        hash_name: one of `HASHES`.
        seeds: [rows] int64 of the row's request.
        places: [rows] int64: the token whose noise it is comes behind this one of the request, counted from 0.
        token_ids: [rows, width] ids.

    Raises:
        KeyError: there is no such hash.
    """
    draw, (rows, width) = HASHES[hash_name], token_ids.shape
    found = np.empty((rows, width), dtype=np.float32)
    step = max(_BLOCK // max(width, 1), 1)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        found[part] = draw(_unsigned(seeds[part]), _unsigned(places[part]), token_ids[part])
    return found


def _unsigned(values: npt.NDArray[np.int64]) -> _Longs:
    """[rows, 1] the same 64 bits."""
    return np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)[:, None]


def _low(values: _Longs) -> _Words:
    return (values & 0xFFFFFFFF).astype(np.uint32)


# --- vLLM 0.31 and later ---------------------------------------------------------------------------------------------


def _absorb(state: _Words, word: _Words) -> _Words:
    """One round of MurmurHash3_x86_32."""
    word = word * np.uint32(0xCC9E2D51)
    word = (word << np.uint32(15)) | (word >> np.uint32(17))
    state = state ^ (word * np.uint32(0x1B873593))
    state = (state << np.uint32(13)) | (state >> np.uint32(19))
    return state * np.uint32(5) + np.uint32(0xE6546B64)


def _murmur(seeds: _Longs, places: _Longs, token_ids: IntArray) -> FloatArray:
    state = np.zeros((len(seeds), 1), dtype=np.uint32)
    for word in (_low(seeds), _low(seeds >> np.uint64(32)), _low(places), token_ids.astype(np.uint32)):
        state = _absorb(state, word)
    state ^= np.uint32(16)  # bytes
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    uniform = (state >> np.uint32(16)).astype(_f32) * _f32(2.0**-16)
    uniform += ((state & 0xFFFF).astype(_f32) + _f32(0.5)) * _f32(2.0**-32)
    # log(1 - u): its Taylor series where 1 - u would lose the bits that decide who wins
    series = np.full(uniform.shape, 1 / 8, dtype=_f32)
    for denominator in range(7, 0, -1):
        series *= uniform
        series += _f32(1 / denominator)
    near = -uniform * series
    far = np.log(np.maximum(_f32(1) - uniform, _f32(2.0**-24)))
    noise: FloatArray = -np.log(-np.where(uniform < _f32(0.25), near, far))
    return noise


# --- before ----------------------------------------------------------------------------------------------------------


def _philox_word(counter: _Longs, key: _Longs) -> _Longs:
    """The first word of Philox4x32-10, whose counter has its high 64 bits 0; both arguments uint64."""
    word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    first, second = counter & word, counter >> half
    third = fourth = np.zeros_like(first)
    low, high = key & word, key >> half
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * first, np.uint64(0xCD9E8D57) * third
        first, third = (two >> half) ^ second ^ low, (one >> half) ^ fourth ^ high
        second, fourth = two & word, one & word
        low, high = (low + np.uint64(0x9E3779B9)) & word, (high + np.uint64(0xBB67AE85)) & word
    return first


def _philox(seeds: _Longs, places: _Longs, token_ids: IntArray) -> FloatArray:
    # the place's own stream begins with a word of the request's
    keys = _philox_word(places, seeds)
    signed = _low(_philox_word(token_ids.astype(np.uint64), keys)).view(np.int32)
    uniform = np.where(signed < 0, ~signed, signed).astype(_f32) * _f32(4.6566127342e-10)
    noise: FloatArray = -np.log(-np.log1p(-np.maximum(uniform, _f32(4.6566127342e-10))))
    return noise


HASHES: Mapping[str, Callable[[_Longs, _Longs, IntArray], FloatArray]] = {"murmur": _murmur, "philox": _philox}
"""Name, as `Features.v2_noise` has it -> [rows, width] noise of seeds [rows, 1], places [rows, 1] and tokens."""
