"""Drafts for a batch, looked up on the device in two launches, of which nothing comes back to the host.

The first launch scans: one program per tile of a request's texts compares its places with the end of the request's own
tokens, and keeps those that agree longest. The second votes: one program per request follows the best places of all its
tiles and lets them vote on each next node. `naive.py` is the specification.

Tokens are read where they lie: earlier answers in a buffer of texts, and what runs in vLLM's table of all requests'
tokens, whose lengths are known to the device alone. So the host tells how many tiles there are at most, and each
program finds its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_specrollout.kernels.lookup.naive import DOUBTS, PER_TILE, PLACES, REACH, TILE

__all__ = ["Lookup"]

_CHUNK, _MOST_TEXTS = 256, 255
"""Places of tiles that are ranked at a time; texts of a request, at most: their numbers have eight bits."""
# a score: how many tokens agree, which text it is, and which of its tokens, counted from 1
_AGREEING, _TEXT, _TOKEN = tl.constexpr(40), tl.constexpr(32), tl.constexpr((1 << 32) - 1)


@triton.jit
def _texts_of(spans_ptr, prompts_ptr, lengths_ptr, stride, batch_ptr, text, PAST: tl.constexpr, SIBLINGS: tl.constexpr):
    """A request's texts, those in numbers `text`: earlier answers, siblings, its own tokens.

    Returns:
        The row of the running request that each is of, or -1; where it begins; its first place; its end.
    """
    problem = tl.load(batch_ptr + 1)
    is_past = tl.where(problem >= 0, text, PAST) < PAST
    span = spans_ptr + (problem.to(tl.int64) * PAST + text) * 3
    is_running = (text >= PAST) & (text <= PAST + SIBLINGS)
    # the request itself stands before its siblings in its row of the batch, and behind them here
    column = tl.where(text == PAST + SIBLINGS, 0, 2 + text - PAST)
    owner = tl.load(batch_ptr + column, mask=is_running, other=-1)
    is_running = owner >= 0
    row = owner.to(tl.int64) * stride
    begin = tl.where(is_running, row, tl.load(span, mask=is_past, other=0).to(tl.int64))
    is_sibling = is_running & (text < PAST + SIBLINGS)
    # of a sibling's prompt, which is the request's own, the last place alone
    first = begin + tl.maximum(tl.load(prompts_ptr + owner, mask=is_sibling, other=1).to(tl.int64) - 1, 0)
    now = row + tl.load(lengths_ptr + owner, mask=is_running, other=0)
    end = tl.where(is_running, now, tl.load(span + 1, mask=is_past, other=0).to(tl.int64))
    return owner, begin, first, end


@triton.jit
def _scan(
    texts_ptr, spans_ptr, running_ptr, prompts_ptr, lengths_ptr, stride, batch_ptr, batch_stride, found_ptr,
    TILE: tl.constexpr, REACH: tl.constexpr, PER_TILE: tl.constexpr,
    PAST: tl.constexpr, SIBLINGS: tl.constexpr, TEXTS: tl.constexpr,
):  # fmt: skip
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch_ptr += request * batch_stride
    text = tl.arange(0, TEXTS)
    owners, begins, firsts, ends = _texts_of(
        spans_ptr, prompts_ptr, lengths_ptr, stride, batch_ptr, text, PAST, SIBLINGS
    )
    # a text's last token is no place
    tiles = tl.maximum(ends - firsts - 1 + TILE - 1, 0) // TILE
    before = tl.cumsum(tiles, 0) - tiles
    is_mine = (before <= tile) & (tile < before + tiles)
    out = found_ptr + (request * tl.num_programs(1) + tile) * PER_TILE
    if tl.max(is_mine.to(tl.int32), 0) == 0:
        for k in tl.static_range(PER_TILE):
            tl.store(out + k, tl.zeros((), tl.int64))
        return
    mine = tl.sum(tl.where(is_mine, text, 0), 0)
    owner = tl.sum(tl.where(is_mine, owners, 0), 0)
    begin = tl.sum(tl.where(is_mine, begins, 0), 0)
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    place = tl.sum(tl.where(is_mine, firsts + (tile - before) * TILE, 0), 0) + tl.arange(0, TILE).to(tl.int64)
    source = tl.where(owner >= 0, running_ptr.to(tl.int64), texts_ptr.to(tl.int64)).to(tl.pointer_type(tl.int32))
    slot = tl.load(batch_ptr)
    own_length = tl.load(lengths_ptr + slot)
    own_end = running_ptr + slot.to(tl.int64) * stride + own_length
    after = tl.load(source + place + 1, mask=place + 1 < end, other=-1)
    agrees = after >= 0
    agreeing = tl.zeros([TILE], tl.int64)
    # nearly all places are out after two tokens
    for back in tl.static_range(2):
        own = tl.load(own_end - 1 - back, mask=back < own_length, other=-2)
        there = tl.load(source + place - back, mask=agrees & (place - back >= begin), other=-3)
        agrees = agrees & (there == own)
        agreeing += agrees.to(tl.int64)
    if tl.max(agrees.to(tl.int32), 0) > 0:
        for behind in range(2, REACH):
            own = tl.load(own_end - 1 - behind, mask=behind < own_length, other=-2)
            there = tl.load(source + place - behind, mask=agrees & (place - behind >= begin), other=-3)
            agrees = agrees & (there == own)
            agreeing += agrees.to(tl.int64)
    score = tl.where(agreeing > 0, (agreeing << _AGREEING) | (mine.to(tl.int64) << _TEXT) | (place - begin + 1), 0)
    for k in tl.static_range(PER_TILE):
        best = tl.max(score, 0)
        tl.store(out + k, best)
        score = tl.where(score == best, 0, score)


@triton.jit
def _vote(
    texts_ptr, spans_ptr, running_ptr, prompts_ptr, lengths_ptr, stride, batch_ptr, batch_stride, found_ptr, num_found,
    doubts_ptr, limits_ptr, branches_ptr, ends_ptr, drafts_ptr, parents_ptr, chances_ptr, nodes, max_depth,
    PLACES: tl.constexpr, CHUNK: tl.constexpr, ENDS: tl.constexpr, KINDS: tl.constexpr,
    PAST: tl.constexpr, SIBLINGS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    batch_ptr += request * batch_stride
    lane = tl.arange(0, PLACES)
    best = tl.zeros([PLACES], tl.int64)
    for start in range(0, num_found, CHUNK):
        column = start + tl.arange(0, CHUNK)
        score = tl.load(found_ptr + request * num_found + column, mask=column < num_found, other=0)
        kept, best = best, tl.zeros([PLACES], tl.int64)
        for k in range(PLACES):
            most = tl.maximum(tl.max(score, 0), tl.max(kept, 0))
            best = tl.where(lane == k, most, best)
            score = tl.where(score == most, 0, score)
            kept = tl.where(kept == most, 0, kept)
    # who stands at the newest node: at first all at the root, except who found no place, and reads nothing of any text
    moved = best > 0
    agreeing = (best >> _AGREEING).to(tl.int32)
    text = tl.where(moved, ((best >> _TEXT) & 255).to(tl.int32), 255)
    owner, begin, _, end = _texts_of(spans_ptr, prompts_ptr, lengths_ptr, stride, batch_ptr, text, PAST, SIBLINGS)
    source = tl.where(owner >= 0, running_ptr.to(tl.int64), texts_ptr.to(tl.int64)).to(tl.pointer_type(tl.int32))
    span = spans_ptr + (tl.load(batch_ptr + 1).to(tl.int64) * PAST + text) * 3
    weight = tl.exp2(tl.load(span + 2, mask=moved & (owner < 0), other=0).to(tl.float32) * 0.125)
    first = begin + (best & _TOKEN)
    limit, is_tree = tl.load(limits_ptr + request), tl.load(branches_ptr + request) != 0
    # where each place stands, and what it offers there: a token, and the path's probability, 0 where there is none
    at, level = tl.full([PLACES], -1, tl.int32), tl.zeros([PLACES], tl.int32)
    token, offer = tl.full([PLACES], -1, tl.int32), tl.zeros([PLACES], tl.float32)
    path = tl.full([], 1.0, tl.float32)
    for node in range(nodes):
        ahead = tl.load(source + first + level, mask=moved & (first + level < end), other=-1)
        reads = tl.where(level < max_depth, ahead, -1) >= 0
        same = (ahead[:, None] == ahead[None, :]) & reads[:, None] & reads[None, :]
        near = agreeing + 2 * level
        kind = tl.where(near <= 8, near - 1, 8 + (near > 12).to(tl.int32) + (near > 16) + (near > 32))
        chance = tl.zeros([PLACES], tl.float32)
        left = tl.full([], 1.0, tl.float32)
        for other in range(KINDS):
            its = KINDS - 1 - other
            counts = reads & (kind == its)
            count = tl.sum(counts.to(tl.float32), 0)
            if count > 0:
                # a token is counted where it stands first
                earlier = same & counts[None, :] & (lane[None, :] < lane[:, None])
                is_first = counts & (tl.sum(earlier.to(tl.int32), 1) == 0)
                distinct = tl.sum(is_first.to(tl.float32), 0)
                doubt = tl.load(doubts_ptr + its) * distinct * distinct
                # rounded as the specification rounds: equal offers are equal on every device
                rest = tl.div_rn(left * doubt, count + doubt)
                votes = tl.where(counts, weight, 0.0)
                share = (left - rest) * tl.sum(tl.where(same, votes[None, :], 0.0), 1)
                chance += tl.div_rn(share, tl.sum(votes, 0))
                left = rest
        is_end = tl.zeros([PLACES], tl.int1)
        for e in tl.static_range(ENDS):
            is_end = is_end | (ahead == tl.load(ends_ptr + request * ENDS + e))
        # who did not come along still offers what it did, in a chain nothing
        token = tl.where(moved, ahead, token)
        offer = tl.where(moved, tl.where(reads & (is_end == 0), path * chance, 0.0), tl.where(is_tree, offer, 0.0))
        path = tl.where(node < limit, tl.max(offer, 0), 0.0)
        # among equals the first: it agreed longest, then it is the latest
        is_best = lane == tl.min(tl.where(offer == path, lane, PLACES), 0)
        chosen = tl.where(path > 0, tl.sum(tl.where(is_best, token, 0), 0), -1)
        parent = tl.where(path > 0, tl.sum(tl.where(is_best, at, 0), 0), -1)
        out = request * nodes + node
        tl.store(drafts_ptr + out, chosen)
        tl.store(parents_ptr + out, parent)
        tl.store(chances_ptr + out, path)
        moved = (offer > 0) & (token == chosen) & (at == parent)
        at = tl.where(moved, node, at)
        level += moved.to(tl.int32)


class Lookup:
    """Both launches, with the memory between them.

    Args:
        nodes: of a draft, at most.
        max_reqs: requests of a batch, at most.
        most_found: tiles that a request may have, times the requests of its batch, at most.
        max_depth: tokens on a path from a draft's root, at most.
    """

    def __init__(
        self, nodes: int, max_reqs: int, most_found: int, device: torch.device, *, max_depth: int,
        tile: int = TILE, reach: int = REACH, voting: int = PLACES, per_tile: int = PER_TILE,
    ) -> None:  # fmt: skip
        self.nodes, self.max_depth, self.tile = nodes, max_depth, tile
        self._reach, self._voting, self._per_tile = reach, voting, per_tile
        self._found = torch.empty(most_found * per_tile, dtype=torch.int64, device=device)
        self._doubts = torch.tensor(DOUBTS, dtype=torch.float32, device=device)
        self.drafts = torch.empty(max_reqs, nodes, dtype=torch.int32, device=device)
        self.parents = torch.empty_like(self.drafts)
        self.chances = torch.empty(max_reqs, nodes, dtype=torch.float32, device=device)

    def __call__(
        self, texts: torch.Tensor, spans: torch.Tensor, running: torch.Tensor, prompts: torch.Tensor,
        lengths: torch.Tensor, batch: torch.Tensor, limits: torch.Tensor, branches: torch.Tensor, ends: torch.Tensor,
        most_tiles: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Look drafts up.

        Args:
            texts: [tokens] int32 earlier answers, each behind the last tokens of its prompt.
            spans: [problems, past, 3] int32 of each earlier answer: its first token, its end, and eighths of the
                base-2 logarithm of its weight in a vote; no answer: the end is the first token.
            running: [rows, most tokens] int32 tokens of the requests that run.
            prompts, lengths: [rows] int32 tokens of the prompt, and of all that there is.
            batch: [R, 2 + siblings] int32 the request's row of `running`; that of its problem in `spans`, or -1; rows
                of its siblings, -1 where there are no more. With `past`, at most 255 texts.
            limits: [R] int32 most nodes of each draft.
            branches: [R] int32 whether it is a tree; 0: a chain, whose nodes follow one another.
            ends: [R, at least 1] int32 tokens that are not drafted; -1: none.
            most_tiles: of a request, at most: `tile` places each, a text's last one with fewer.

        Returns:
            [R, nodes] int32 drafts, -1 behind their ends; [R, nodes] int32 parents, which come before their children,
            -1: the root; [R, nodes] float32 probabilities that the answer goes on by the path to each node. All are
            overwritten by the next call.

        Raises:
            ValueError: more requests or tiles than there is memory for, or more texts than their numbers tell apart.
        """
        (requests, columns), past, room = batch.shape, spans.shape[1], len(self._found) // self._per_tile
        if requests > len(self.drafts) or requests * most_tiles > room or past + columns - 1 > _MOST_TEXTS:
            raise ValueError(
                f"{requests} requests of {most_tiles} tiles and {past + columns - 1} texts each, where there is room"
                f" for {len(self.drafts)} requests, {room} tiles and {_MOST_TEXTS} texts"
            )
        where = (texts, spans, running, prompts, lengths, running.stride(0), batch, columns, self._found)
        sizes = {"PAST": past, "SIBLINGS": columns - 2}
        if most_tiles:
            _scan[(requests, most_tiles)](
                *where, TILE=self.tile, REACH=self._reach, PER_TILE=self._per_tile,
                TEXTS=triton.next_power_of_2(past + columns - 1), **sizes,
            )  # fmt: skip
        _vote[(requests,)](
            *where, most_tiles * self._per_tile, self._doubts, limits, branches, ends,
            self.drafts, self.parents, self.chances, self.nodes, self.max_depth,
            PLACES=self._voting, CHUNK=_CHUNK, ENDS=ends.shape[1], KINDS=len(DOUBTS), num_warps=1, **sizes,
        )  # fmt: skip
        return self.drafts[:requests], self.parents[:requests], self.chances[:requests]
