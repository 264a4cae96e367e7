"""The specification of `kernel.py`: the same noise in Python and numpy, the same walk in loops.

The noise is a hash of (seed, position, token) turned into a Gumbel variable; adding it to the logits and taking the
argmax draws from their softmax (E. J. Gumbel, 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014). The hash is
MurmurHash3_x86_32 (A. Appleby, public domain) of four words: the seed's low and high half, the position's low half and
the token. Which noise it is does not matter for the distribution; that it is the noise of vLLM's sampler, bit for bit,
is what makes the tokens those of plain decoding. So every rounding step below is in vLLM's order. Before vLLM 0.31 that
noise came from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

In the interpreter numpy is also what computes the kernel's floats, and the two agree to the bit. On a GPU the logarithm
and fused multiply-adds round differently, and noises agree to about 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_WORD = 0xFFFFFFFF
_HIGH_DOMAIN = 0x9E3779B9
"""Start value of the second hash, whose word is the high half of the 64 random bits of the fp64 form."""


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """What the walks of R requests found, on the logits' device."""

    token_ids: torch.Tensor
    """[R, width] int64: accepted drafts, then the bonus token; -1 beyond num_sampled."""
    num_sampled: torch.Tensor
    """[R] int32: how many tokens count; 0 for a request without rows."""
    path: torch.Tensor
    """[R, width] int32: the row, counted from the request's root, that each token was sampled at; 0 beyond."""


def _rotated(word: Any, by: int) -> Any:
    return ((word << by) | (word >> (32 - by))) & _WORD


def murmur3(words: Sequence[Any], start: int = 0) -> Any:
    """MurmurHash3_x86_32 of whole 32-bit words.

    Args:
        words: integers below 2**32, or uint64 arrays of such (all of one shape), in which case so is the result.
        start: the hash's own seed.
    """
    state: Any = start
    for word in words:
        word = _rotated((word * 0xCC9E2D51) & _WORD, 15)
        state = state ^ ((word * 0x1B873593) & _WORD)
        state = (_rotated(state, 13) * 5 + 0xE6546B64) & _WORD
    state = state ^ (4 * len(words))
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return state ^ (state >> 16)


def _words(seed: int, pos: int, vocab: int) -> list[Any]:
    return [seed & _WORD, (seed >> 32) & _WORD, pos & _WORD, np.arange(vocab, dtype=np.uint64)]


def noise32(seed: int, pos: int, vocab: int) -> npt.NDArray[np.float32]:
    """[vocab] float32 Gumbel noise of every token, for one seed and position (64-bit integers, any sign)."""
    f32 = np.float32
    random = murmur3(_words(seed, pos, vocab))
    # (random + 1/2) / 2**32: both products are exact, so there is one rounding; many bits near 0, where winners are
    uniform = (random >> 16).astype(f32) * f32(2.0**-16) + ((random & 0xFFFF).astype(f32) + f32(0.5)) * f32(2.0**-32)
    # log(1 - u) by its Taylor series where the logarithm itself would cancel
    series = np.full(vocab, 1 / 8, dtype=f32)
    for denominator in range(7, 0, -1):
        series = f32(1 / denominator) + uniform * series
    near = -uniform * series
    far = np.log(np.maximum(f32(1) - uniform, f32(2.0**-24)))
    return -np.log(-np.where(uniform < f32(0.25), near, far))


def noise64(seed: int, pos: int, vocab: int) -> npt.NDArray[np.float64]:
    """[vocab] float64 Gumbel noise from 53 random bits."""
    words = _words(seed, pos, vocab)
    bits = ((murmur3(words, _HIGH_DOMAIN) << 32) | murmur3(words)) >> 11
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    # the largest midpoint rounds to 1, whose noise would be infinite
    uniform = np.where(uniform == 1.0, uniform - 2.0**-53, uniform)
    return -np.log(-np.log(uniform))


def philox(counter: Any, key: int) -> Any:
    """The first word of Philox4x32-10.

    Args:
        counter: its low 64 bits, an integer or a uint64 array; the high ones are 0.
        key: 64 bits.
    """
    first, second = counter & _WORD, (counter >> 32) & _WORD
    third = fourth = first * 0
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        one, two = 0xD2511F53 * first, 0xCD9E8D57 * third
        first, third = (two >> 32) ^ second ^ low, (one >> 32) ^ fourth ^ high
        second, fourth = two & _WORD, one & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return first


def philox_noise32(seed: int, pos: int, vocab: int) -> npt.NDArray[np.float32]:
    """[vocab] as `noise32`, of vLLM before 0.31."""
    f32 = np.float32
    # the position's own stream begins with a word of the request's
    random = philox(np.arange(vocab, dtype=np.uint64), philox(pos & ((1 << 64) - 1), seed & ((1 << 64) - 1)))
    signed = random.astype(np.uint32).view(np.int32)
    uniform = np.where(signed < 0, ~signed, signed).astype(f32) * f32(4.6566127342e-10)
    return -np.log(-np.log1p(-np.maximum(uniform, f32(4.6566127342e-10))))


def sample_rows(
    logits: torch.Tensor,
    request_index: Sequence[int],
    temperature: Sequence[float],
    seeds: Sequence[int],
    pos: Sequence[int],
    use_fp64: bool = False,
    is_philox: bool = False,
) -> list[int]:
    """The target's own token at each of L rows; arguments as those of `tree_verify`. NaN never wins."""
    noise = philox_noise32 if is_philox else noise64 if use_fp64 else noise32
    tokens = []
    for row, request, position in zip(logits, request_index, pos, strict=True):
        scores: Any = row.float().cpu().numpy()
        if use_fp64:
            scores = scores.astype(np.float64)
        if request >= 0 and temperature[request] != 0:
            scores = scores + noise(seeds[request], position, len(scores))
        tokens.append(int(np.argmax(np.where(np.isnan(scores), -np.inf, scores))))
    return tokens


def walk(sampled: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """From one request's root down to the first token that nobody drafted.

    Args:
        sampled: [rows] the target's own token at each row; row 0 is the root.
        draft_ids: [rows] the token each row was computed for.
        parents: [rows] each row's parent row, -1 for the root.

    Returns:
        the tokens, and the row that each was sampled at.
    """
    tokens: list[int] = []
    path: list[int] = []
    row = 0
    while True:
        tokens.append(sampled[row])
        path.append(row)
        children = [i for i in range(len(parents)) if parents[i] == row and draft_ids[i] == sampled[row]]
        if not children:
            return tokens, path
        row = children[0]


def judge(
    sampled: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int], cu_rows: Sequence[int], width: int
) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """`TreeVerdict`'s token_ids, num_sampled and path as lists, from the tokens sampled at all rows."""
    token_ids, num_sampled, paths = [], [], []
    for begin, end in zip(cu_rows[:-1], cu_rows[1:], strict=True):
        rows = slice(begin, min(end, begin + width))
        tokens, path = walk(sampled[rows], draft_ids[rows], parents[rows]) if end > begin else ([], [])
        token_ids.append(tokens + [-1] * (width - len(tokens)))
        num_sampled.append(len(tokens))
        paths.append(path + [0] * (width - len(path)))
    return token_ids, num_sampled, paths


def tree_verify(
    logits: torch.Tensor,
    request_index: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    pos: torch.Tensor,
    draft_ids: torch.Tensor,
    parents: torch.Tensor,
    cu_rows: torch.Tensor,
    *,
    width: int,
    use_fp64: bool = False,
    is_philox: bool = False,
) -> TreeVerdict:
    """Arguments and result as those of `kernel.tree_verify`."""
    sampled = sample_rows(
        logits, request_index.tolist(), temperature.tolist(), seeds.tolist(), pos.tolist(), use_fp64, is_philox
    )
    token_ids, num_sampled, path = judge(sampled, draft_ids.tolist(), parents.tolist(), cu_rows.tolist(), width)
    return TreeVerdict(
        torch.tensor(token_ids, dtype=torch.int64, device=logits.device).view(-1, width),
        torch.tensor(num_sampled, dtype=torch.int32, device=logits.device),
        torch.tensor(path, dtype=torch.int32, device=logits.device).view(-1, width),
    )
