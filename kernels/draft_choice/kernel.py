"""The draft that each request of a batch gets, chosen on the device in one launch: that of which most tokens come.

One program per request. It reads what was looked up, what is left of the line that the host carried there, and what a
model drafted; `naive.py` is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_specrollout.kernels.draft_choice.naive import CHAIN_CHANCE, LINED, LOOKED, MODELLED, TENTHS, WITHHELD

__all__ = ["choose"]

_CHAIN, _TENTHS, _WITHHELD = tl.constexpr(CHAIN_CHANCE), tl.constexpr(TENTHS), tl.constexpr(WITHHELD)
_LOOKED, _LINED, _MODELLED = tl.constexpr(LOOKED), tl.constexpr(LINED), tl.constexpr(MODELLED)


@triton.jit
def _tokens_of(parents, is_there, chances, factors_ptr, node, MOST: tl.constexpr, HAS_BRANCHES: tl.constexpr):
    """What the chances come to by what held lately, and how many tokens the draft brings."""
    tenth = tl.minimum((chances * _TENTHS).to(tl.int32), _TENTHS - 1)
    known = tl.minimum(chances * tl.load(factors_ptr + tenth), 1.0)
    known = tl.where(is_there, known, 0.0)
    if HAS_BRANCHES:
        path = tl.zeros_like(known)
        for j in range(MOST):
            above = tl.sum(tl.where(node == j, parents, 0), 0)
            reach = tl.where(above >= 0, tl.sum(tl.where(node == above, path, 0.0), 0), 1.0)
            path = tl.where(node == j, known * reach, path)
    else:
        path = tl.cumprod(known, 0)
    return known, tl.sum(path, 0)


@triton.jit
def _walked(tokens_ptr, parents_ptr, paths_ptr, request, node, MOST: tl.constexpr):
    """A draft of which it is known how likely the target walks down to each node: tokens, parents, chances, and which
    nodes there are."""
    own = request * MOST + node
    tokens = tl.load(tokens_ptr + own, mask=node < MOST, other=-1)
    is_in = tokens >= 0
    parents = tl.where(is_in, tl.load(parents_ptr + own, mask=node < MOST, other=-1), -1)
    above = tl.load(paths_ptr + request * MOST + parents, mask=is_in & (parents >= 0), other=1.0)
    chances = tl.where(is_in, tl.load(paths_ptr + own, mask=is_in, other=0.0) / above, 0.0)
    return tokens, parents, chances, is_in


@triton.jit
def _chain_of(token, limit, ends_ptr, node, NODES: tl.constexpr, ENDS: tl.constexpr):
    """Where a chain of these tokens goes on."""
    is_there = (token >= 0) & (node < limit)
    for e in tl.static_range(ENDS):
        is_there = is_there & (token != tl.load(ends_ptr + e))
    return node < tl.min(tl.where(is_there, NODES, node), 0)


@triton.jit
def _choose(
    words_ptr, words_stride, confidence_ptr, rows_ptr, running_ptr, stride, lengths_ptr,
    limits_ptr, until_ptr, ends_ptr, factors_ptr,
    looked_ptr, parents_ptr, paths_ptr, lines_ptr, modelled_ptr, above_ptr, reach_ptr, withheld,
    MOST: tl.constexpr, NODES: tl.constexpr, LINE: tl.constexpr, ENDS: tl.constexpr,
    HAS_LOOKED: tl.constexpr, HAS_MODELLED: tl.constexpr, HAS_BRANCHES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    limit = tl.load(limits_ptr + request)
    ends_ptr += request * ENDS
    node = tl.arange(0, NODES)
    is_node = node < MOST
    # the best one so far
    tokens, parents, is_in = tl.full([NODES], -1, tl.int32), node - 1, node < 0
    chances, best_known = tl.full([NODES], _CHAIN, tl.float32), tl.zeros([NODES], tl.float32)
    most, kind = tl.full([], -1.0, tl.float32), tl.full([], -1, tl.int32)
    if HAS_LOOKED:
        tokens, parents, chances, is_in = _walked(looked_ptr, parents_ptr, paths_ptr, request, node, MOST)
        factors = factors_ptr + _LOOKED * _TENTHS
        best_known, most = _tokens_of(parents, is_in, chances, factors, node, MOST, HAS_BRANCHES)
        kind += 1 + _LOOKED
    even = tl.full([NODES], _CHAIN, tl.float32)
    if LINE > 0:
        place = tl.arange(0, LINE)
        lines_ptr += row * (1 + LINE)
        begin = tl.load(lines_ptr)
        since = tl.where(begin > 0, length - begin, -1)
        came = place < since
        there = tl.load(running_ptr + row * stride + begin + place, mask=came, other=-1)
        line = tl.load(lines_ptr + 1 + place)
        differs = tl.max((came & (line != there)).to(tl.int32), 0)
        end = tl.where(since >= 0, LINE - LINE * differs, 0)
        left = since + node
        token = tl.load(lines_ptr + 1 + left, mask=is_node & (left >= 0) & (left < end), other=-1)
        is_there = _chain_of(token, limit, ends_ptr, node, NODES, ENDS)
        known, brings = _tokens_of(node - 1, is_there, even, factors_ptr + _LINED * _TENTHS, node, MOST, False)
        if brings > most:
            tokens, parents, chances, is_in, best_known = token, node - 1, even, is_there, known
            most, kind = brings, tl.full([], _LINED, tl.int32)
    if HAS_MODELLED:
        token, above, even, is_there = _walked(modelled_ptr, above_ptr, reach_ptr, request, node, MOST)
        factors = factors_ptr + _MODELLED * _TENTHS
        known, brings = _tokens_of(above, is_there, even, factors, node, MOST, HAS_BRANCHES)
        if brings > most:
            tokens, parents, chances, is_in, best_known = token, above, even, is_there, known
            kind = tl.full([], _MODELLED, tl.int32)
    kept = is_in & (node < tl.load(until_ptr + request) - length - 1)
    out = words_ptr + row * words_stride
    tl.store(out + node, tl.where(kept, tokens, -1), mask=is_node)
    tl.store(out + MOST + node, tl.where(is_in, parents, -1), mask=is_node)
    bits = tl.where(is_in, chances, 0.0).to(tl.int32, bitcast=True)
    tl.store(out + 2 * MOST + node, bits, mask=is_node)
    tl.store(out + 3 * MOST, kind + tl.where(request == withheld, _WITHHELD, 0))
    tl.store(confidence_ptr + request * MOST + node, tl.where(kept, best_known, 0.0), mask=is_node)


def choose(
    words: torch.Tensor, confidence: torch.Tensor, rows: torch.Tensor, running: torch.Tensor, lengths: torch.Tensor,
    limits: torch.Tensor, until: torch.Tensor, ends: torch.Tensor, factors: torch.Tensor, *,
    looked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None, lines: torch.Tensor | None = None,
    modelled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None, withheld: int = -1,
    has_branches: bool = False,
) -> None:  # fmt: skip
    """Choose each request's draft; of those that bring as much, the first of these kinds.

    Args:
        words: [rows of requests, 3 * K + 1] int32, written for the batch's: tokens (-1: none), parents (-1: the root)
            and bits of the chances that a node holds where its parent does, as its drafter says; and the kind, with
            `WITHHELD`.
        confidence: [at least R, K] float32, written: those chances by what held lately.
        rows: [R] int32 or int64 each request's row.
        running, lengths: [rows, most tokens] int32 and [rows] int32 tokens of the requests, and how many.
        limits: [R] int32 most nodes of a line; until: [R] int32 most tokens of the request.
        ends: [R, at least 1] int32 tokens that no line has; -1: none.
        factors: [3, TENTHS] float32 per kind and tenth of a chance, what it is multiplied by.
        looked: as `Lookup` returns it; None: nothing was looked up. One kind of draft at least there is.
        lines: [rows, 1 + L] int32 tokens of a request when its line begins, and the line, -1 behind its end.
        modelled: what a model drafted, likewise.
        withheld: the request of the batch whose verdict is withheld; -1: none's is.
        has_branches: whether some of what was looked up, or a model drafted, may branch.
    """
    width = confidence.shape[1]
    none = words
    _choose[(len(rows),)](
        words, words.stride(0), confidence, rows, running, running.stride(0), lengths, limits, until, ends, factors,
        *(looked or (none, none, confidence)), none if lines is None else lines,
        *(modelled or (none, none, confidence)), withheld,
        MOST=width, NODES=triton.next_power_of_2(width), LINE=0 if lines is None else lines.shape[1] - 1,
        ENDS=ends.shape[1], HAS_LOOKED=looked is not None, HAS_MODELLED=modelled is not None,
        HAS_BRANCHES=has_branches, num_warps=1,
    )  # fmt: skip
