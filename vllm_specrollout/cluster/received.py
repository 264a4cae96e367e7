"""Drafts that came from a drafter for one request, on the verifier's side. Pure.

What belongs here: what of a tree that arrived still fits what the request has become. It may be late, lost or doubled.
None of that matters to the output: what does not continue the request's own tokens is not verified, and what is
verified is verified exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.cluster.messages import Drafts
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import ROOT, IntArray, TreeBatch


@dataclass(frozen=True, slots=True)
class Fitting:
    """What of a tree may be verified next."""

    token_ids: list[int]
    parents: list[int]
    log_q: list[float]
    # whether each node is the first choice behind its parent
    is_first: list[bool]


@dataclass(frozen=True, slots=True)
class Score:
    """How drafts fared, over the positions that the target came to along them."""

    # positions for which something was drafted
    tried: int = 0
    # the first choice was the target's own token
    matched: int = 0
    # one of the choices was
    covered: int = 0
    # tokens of the stream that had come from behind a first choice which the target did not take
    wasted: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tried + other.tried,
            self.matched + other.matched,
            self.covered + other.covered,
            self.wasted + other.wasted,
        )


NONE_OF_THEM = 8
"""Rank of a token that no choice was: `decoupled.fan_out` is at most that."""


class Received:
    """The newest tree of one request's stream."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        """Which of the drafter's choices the request's tokens were: 0 the first, `NONE_OF_THEM` none. In the tokens'
        order, each once, without those that came before any choice did."""
        self.wasted = 0
        """As in `Score`."""
        self._drafts: Drafts | None = None
        # tokens whose ranks are known, or will never be
        self._num_ranked = 0

    @property
    def score(self) -> Score:
        tried, missed = len(self.ranks), self.ranks.count(NONE_OF_THEM)
        return Score(tried, self.ranks.count(0), tried - missed, self.wasted)

    def put(self, drafts: Drafts) -> None:
        """A tree has come: it takes the place of an older one."""
        old = self._drafts
        if old is None or (drafts.position, drafts.generation) >= (old.position, old.generation):
            self._drafts = drafts

    def fitting(self, token_ids: IntArray, most: int, most_depth: int, is_chain: bool) -> Fitting | None:
        """What may be verified next; None: nothing that fits has come.

        Args:
            token_ids: [num_tokens] the request's tokens.
            most, most_depth: nodes and levels, at most: the first ones.
            is_chain: first choices alone.
        """
        drafts = self._drafts
        if drafts is None or drafts.position > len(token_ids):
            return None
        tokens, parents, log_q = drafts.token_ids.tolist(), drafts.parents.tolist(), drafts.log_q.tolist()
        # [1 + nodes] children, first choice first: of the root, then of each node
        below: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for child, parent in enumerate(parents):
            below[1 + parent].append(child)
        at, is_stream = ROOT, True
        for position, token in enumerate(token_ids[drafts.position :].tolist(), drafts.position):
            # a tree of another process may have more choices than were asked for
            choices = below[1 + at][:NONE_OF_THEM]
            rank = next((rank for rank, child in enumerate(choices) if tokens[child] == token), NONE_OF_THEM)
            if choices and position >= self._num_ranked:
                self.ranks.append(rank)
                self._num_ranked = position + 1
                if rank and is_stream:
                    self.wasted += _stream_below(below, choices[0])
            if rank == NONE_OF_THEM:
                self._drafts = None
                return None
            at, is_stream = choices[rank], is_stream and not rank
        # node -> its place among those kept, and its depth
        place, depth = {at: ROOT}, {at: 0}
        kept = Fitting([], [], [], [])
        seen: set[int] = set()
        for child in range(at + 1, len(tokens)):
            parent = parents[child]
            if parent not in place or depth[parent] == most_depth or len(kept.token_ids) == most:
                continue
            is_first = parent not in seen
            if is_chain and not is_first:
                continue
            seen.add(parent)
            place[child], depth[child] = len(kept.token_ids), depth[parent] + 1
            kept.token_ids.append(tokens[child])
            kept.parents.append(place[parent])
            kept.log_q.append(log_q[child])
            kept.is_first.append(is_first)
        return kept if kept.token_ids else None


def _stream_below(below: Sequence[Sequence[int]], node: int) -> int:
    """Nodes of the chain of first choices behind a node.

    Args:
        below: [1 + nodes] children: of the root, then of each node.
    """
    count = 0
    while below[1 + node]:
        node, count = below[1 + node][0], count + 1
    return count


def together(request_ids: Sequence[str], drafts: Sequence[Fitting | None], source: int) -> TreeBatch:
    """The drafts of a batch, over its requests.

    Args:
        source: of first choices; the choices beside them have the next one.
    """
    own = [draft for draft in drafts if draft is not None]
    sizes = [0 if draft is None else len(draft.token_ids) for draft in drafts]
    trees = proposed(
        request_ids,
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        np.asarray([token for draft in own for token in draft.token_ids], dtype=np.int32),
        np.asarray([parent for draft in own for parent in draft.parents], dtype=np.int32),
        np.asarray([q for draft in own for q in draft.log_q], dtype=np.float32),
        source,
    )
    is_first = np.asarray([first for draft in own for first in draft.is_first], dtype=np.int32)
    columns = (trees.node_start, trees.token_ids, trees.parents, trees.log_q)
    return TreeBatch(request_ids, *columns, source + 1 - is_first, trees.depth)


def united(drafts: Sequence[Fitting], most: int, is_chain: bool) -> Fitting:
    """One request's drafts from several drafters elsewhere: nodes with the same tokens from the root down are one.

    The union is verified in one pass (SpecActor 4.2, where each drafter has a verifier of its own). What other drafters
    propose is merged later, by the budget (`trees.batch.merge_select`), which takes sources for granted and has one
    chain for each.

    A node has the highest of its probabilities, and is a first choice if one drafter's first choice it is. The order is
    that of the probability to come there, so parents come before children, and a prefix is the best tree of its size.
    `tests/reference/united.py` is its naive twin.

    Args:
        drafts: at least one; their order decides between nodes that are equally likely.
        most: nodes, at most.
        is_chain: the likeliest child alone, level by level.
    """
    tokens: list[int] = []
    parents: list[int] = []
    log_q: list[float] = []
    is_first: list[bool] = []
    places: dict[tuple[int, int], int] = {}
    for own in drafts:
        place = {ROOT: ROOT}
        rows = zip(own.parents, own.token_ids, own.log_q, own.is_first, strict=True)
        for i, (parent, token, q, first) in enumerate(rows):
            key = place[parent], token
            at = place[i] = places.setdefault(key, len(tokens))
            if at == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                log_q.append(q)
                is_first.append(first)
            else:
                log_q[at], is_first[at] = max(log_q[at], q), is_first[at] or first
    order = (_likeliest_chain(parents, log_q) if is_chain else _by_reach(parents, log_q))[:most]
    new = {ROOT: ROOT} | {node: i for i, node in enumerate(order)}
    return Fitting(
        [tokens[node] for node in order],
        [new[parents[node]] for node in order],
        [log_q[node] for node in order],
        [is_first[node] for node in order],
    )


def _by_reach(parents: Sequence[int], log_q: Sequence[float]) -> list[int]:
    """All nodes, those first that the target comes to most often, by the drafters' own words."""
    reach: list[float] = []
    for parent, q in zip(parents, log_q, strict=True):
        reach.append(q if parent == ROOT else reach[parent] + q)
    # no node is likelier than its parent, which has the smaller index, and equals keep their order
    return sorted(range(len(reach)), key=lambda node: -reach[node])


def _likeliest_chain(parents: Sequence[int], log_q: Sequence[float]) -> list[int]:
    best: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent not in best or log_q[node] > log_q[best[parent]]:
            best[parent] = node
    chain, at = [], ROOT
    while at in best:
        at = best[at]
        chain.append(at)
    return chain
