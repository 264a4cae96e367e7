"""The specification of `kernel.py`: one request at a time, in numpy.

A text is whatever a request's answer may go on like: earlier answers to its problem, its siblings' answers so far, its
own prompt and tokens. A place is a token of a text with another one behind it. The places whose last tokens agree
longest with the request's own vote on what comes next. The most probable token becomes a node; the places that go on
with it move on to that node, and vote on what follows it. In a tree the others stay and go on offering their tokens
where they are; in a chain they leave. Votes are shared out as in the history index (docs/adr/0008-history-index.md):
places of a longer agreement explain their part of the probability first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REACH = 32
"""Tokens of agreement that are told apart, at most."""
PLACES = 16
"""Places that vote."""
PER_TILE = 4
"""Places of one tile among them, at most."""
TILE = 256
"""Places that one program compares."""
DOUBTS = tuple(sixteenths / 16 for sixteenths in (16, 12, 9, 9, 10, 13, 16, 11, 8, 6, 3, 2))
"""By how many tokens a place agrees, what one further token that its like disagree on counts for: fitted for the
index, whose rule this is. 1 to 8 tokens are told apart, then 9 to 12, 13 to 16, 17 to 32, more."""


@dataclass(frozen=True, slots=True)
class Text:
    """What an answer may go on like."""

    tokens: npt.NDArray[np.int32]
    """Below 0: nothing agrees with it, and nobody reads beyond it."""
    first: int = 0
    """Its first place; agreement may reach back before it."""
    weight: np.float32 = np.float32(1.0)
    """In the vote."""


def kind_of(agreeing: int) -> int:
    """Index into `DOUBTS`."""
    if agreeing <= 8:
        return agreeing - 1
    return next((kind for kind, most in ((8, 12), (9, 16), (10, 32)) if agreeing <= most), 11)


@dataclass(frozen=True, slots=True)
class Offer:
    """The token that a place would have for the next node."""

    lane: int
    """Which place: those that agree longer come first, and then the latest."""
    parent: int
    """The node where the place stands; -1: the root."""
    level: int
    """Tokens from the root to there."""
    token: int
    chance: np.float32
    """That the answer goes on by the path to this token, as the places that came to the parent vote."""


def look_up(
    texts: Sequence[Text],
    own: npt.NDArray[np.int32],
    ends: Sequence[int],
    limit: int,
    nodes: int,
    *,
    is_chain: bool,
    max_depth: int,
    tile: int = TILE,
    reach: int = REACH,
    voting: int = PLACES,
    per_tile: int = PER_TILE,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A draft for one request, which knows no more than the tokens that it has.

    Args:
        texts: where to look; among places that agree as long, those of later texts come first.
        own: its tokens so far.
        ends: tokens that are never drafted.
        limit: most nodes of the draft.
        nodes: length of what is returned.
        max_depth: most tokens on a path from the root.

    Returns:
        [nodes] int32 drafted tokens, -1 behind the last one; [nodes] int32 parents, which come before their children,
        -1: the root; [nodes] float32 probabilities that the answer goes on by the path to each node.
    """
    found = list[tuple[int, int, int]]()
    for number, text in enumerate(texts):
        agreeing = agreement(text.tokens, own, reach)
        for first in range(text.first, len(agreeing), tile):
            places = first + np.flatnonzero(agreeing[first : first + tile])
            ranked = sorted(((int(agreeing[place]), number, int(place)) for place in places), reverse=True)
            found += ranked[:per_tile]
    voters = sorted(found, reverse=True)[:voting]

    def offered(lanes: Sequence[int], parent: int, level: int, path: np.float32) -> list[Offer]:
        """By places that have come to a node together."""
        read = [
            (lane, token)
            for lane in lanes
            for token in texts[voters[lane][1]].tokens[voters[lane][2] + 1 + level :][:1].tolist()
            if token >= 0 and level < max_depth
        ]
        votes = _votes(
            [(kind_of(voters[lane][0] + 2 * level), token, texts[voters[lane][1]].weight) for lane, token in read]
        )
        return [Offer(lane, parent, level, token, path * votes[token]) for lane, token in read if token not in ends]

    drafts, parents, chances = np.full(nodes, -1, np.int32), np.full(nodes, -1, np.int32), np.zeros(nodes, np.float32)
    offers = offered(range(len(voters)), -1, 0, np.float32(1.0))
    for node in range(min(nodes, limit)):
        if not offers:
            break
        # among equals, that of the place which agrees longest, and then of the latest
        best = max(offers, key=lambda offer: (offer.chance, -offer.lane))
        drafts[node], parents[node], chances[node] = best.token, best.parent, best.chance
        moved = [offer.lane for offer in offers if (offer.parent, offer.token) == (best.parent, best.token)]
        stayed = [] if is_chain else [offer for offer in offers if offer.lane not in moved]
        offers = stayed + offered(moved, node, best.level + 1, best.chance)
    return drafts, parents, chances


def agreement(tokens: npt.NDArray[np.int32], own: npt.NDArray[np.int32], reach: int) -> npt.NDArray[np.int64]:
    """[places] tokens that each place of a text has in common with the end of a request's own, `reach` at most."""
    places = max(len(tokens) - 1, 0)
    agrees, counts = tokens[1:] >= 0, np.zeros(places, np.int64)
    for back in range(min(reach, len(own))):
        there = np.full(places, -1, np.int64)
        there[back:] = tokens[: max(places - back, 0)]
        agrees = agrees & (there == own[-1 - back])
        counts += agrees
        if not agrees.any():
            break
    return counts


def _votes(read: Sequence[tuple[int, int, np.float32]]) -> dict[int, np.float32]:
    """Token -> probability, in the order of those that read it; `read`: (kind, token, weight) of each."""
    left, shares = np.float32(1.0), {token: np.float32(0.0) for _, token, _ in read}
    for kind in reversed(range(len(DOUBTS))):
        own = [(token, weight) for its, token, weight in read if its == kind]
        if not own:
            continue
        distinct = np.float32(len({token for token, _ in own}))
        doubt = np.float32(DOUBTS[kind]) * distinct * distinct
        rest = left * doubt / (np.float32(len(own)) + doubt)
        total = np.float32(sum(weight for _, weight in own))
        for token in shares:
            weight = np.float32(sum(weight for its, weight in own if its == token))
            shares[token] += (left - rest) * weight / total
        left = rest
    return shares
