"""The specification of `kernel.py`: one request at a time, in numpy.

A text is whatever a request's answer may go on like: earlier answers to its problem, its siblings' answers so far, its
own prompt and tokens. A place is a token of a text with another one behind it. The places whose last tokens agree
longest with the request's own vote on what comes next, depth after depth, for as long as they go on with what was
chosen. Their votes are shared out as in the history index (docs/adr/0008-history-index.md): places of a longer
agreement explain their part of the probability first.
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


def look_up(
    texts: Sequence[Text],
    own: npt.NDArray[np.int32],
    ends: Sequence[int],
    limit: int,
    depth: int,
    *,
    tile: int = TILE,
    reach: int = REACH,
    voting: int = PLACES,
    per_tile: int = PER_TILE,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A draft for one request, which knows no more than the tokens that it has.

    Args:
        texts: where to look; among places that agree as long, those of later texts come first.
        own: its tokens so far.
        ends: tokens that are never drafted.
        limit: most tokens of the draft.
        depth: length of what is returned.

    Returns:
        [depth] int32 drafted tokens, -1 behind the last one; [depth] float32 probabilities that each is right, given
        that those before it are.
    """
    found = list[tuple[int, int, int]]()
    for number, text in enumerate(texts):
        agreeing = agreement(text.tokens, own, reach)
        for first in range(text.first, len(agreeing), tile):
            places = first + np.flatnonzero(agreeing[first : first + tile])
            ranked = sorted(((int(agreeing[place]), number, int(place)) for place in places), reverse=True)
            found += ranked[:per_tile]
    voters = sorted(found, reverse=True)[:voting]
    drafts, chances = np.full(depth, -1, np.int32), np.zeros(depth, np.float32)
    for level in range(min(depth, limit)):
        ahead = [(one, texts[one[1]].tokens[one[2] + 1 + level :][:1]) for one in voters]
        read = [(one, int(token[0])) for one, token in ahead if len(token) and token[0] >= 0]
        votes = _votes([(kind_of(one[0] + 2 * level), token, texts[one[1]].weight) for one, token in read])
        votes = {token: chance for token, chance in votes.items() if token not in ends}
        if not votes:
            break
        best = max(votes.values())
        # among equals, that of the place which agrees longest, and then of the latest
        chosen = next(token for _, token in read if votes.get(token) == best)
        drafts[level], chances[level] = chosen, best
        voters = [one for one, token in read if token == chosen]
    return drafts, chances


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
