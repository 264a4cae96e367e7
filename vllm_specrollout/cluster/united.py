"""One tree of a request out of several drafters' trees: nodes with the same tokens from the root down are one. Pure.

The union is verified in one pass (SpecActor 4.2, where each drafter has a verifier of its own). What other drafters of
the engine propose is merged later, by the budget (`trees.batch.merge_select`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.cluster.link import Fitting
from vllm_specrollout.types import ROOT, BoolArray, IntArray


def united(drafts: Sequence[Fitting], most: IntArray, is_chain: BoolArray) -> Fitting:
    """
    A node has the highest of its probabilities, and is a first choice if one drafter's first choice it is. The order is
    that of the probability to come there, so parents come before children, and a prefix is the best tree of its size.
    `tests/reference/united.py` is its naive twin.

    Args:
        drafts: of one batch; their order decides between nodes that are equally likely.
        most: [R] nodes, at most.
        is_chain: [R] the likeliest child alone, level by level.
    """
    starts = [own.node_start.tolist() for own in drafts]
    columns = [
        (own.token_ids.tolist(), own.parents.tolist(), own.log_q.tolist(), own.is_first.tolist()) for own in drafts
    ]
    found: list[tuple[int, int, float, int]] = []
    node_start = [0]
    for r, (count, chain) in enumerate(zip(most.tolist(), is_chain.tolist(), strict=True)):
        rows = [
            list(zip(*(column[start[r] : start[r + 1]] for column in own), strict=True))
            for own, start in zip(columns, starts, strict=True)
        ]
        found += _one([own for own in rows if own], count, chain)
        node_start.append(len(found))
    tokens, parents, log_q, first = zip(*found, strict=True) if found else ((), (), (), ())
    return Fitting(
        np.array(node_start, np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(log_q, np.float32),
        np.array(first, np.int32),
    )


_Row = tuple[int, int, float, int]
"""Token, parent, log probability, whether it is a first choice."""


def _one(drafts: Sequence[Sequence[_Row]], most: int, is_chain: bool) -> list[_Row]:
    """One request's."""
    if len(drafts) < 2:
        return list(drafts[0]) if drafts else []
    nodes: list[_Row] = []
    places: dict[tuple[int, int], int] = {}
    for own in drafts:
        place = {ROOT: ROOT}
        for i, (token, parent, q, first) in enumerate(own):
            key = place[parent], token
            at = place[i] = places.setdefault(key, len(nodes))
            if at == len(nodes):
                nodes.append((token, key[0], q, first))
            else:
                nodes[at] = (token, key[0], max(nodes[at][2], q), nodes[at][3] or first)
    order = (_likeliest_chain(nodes) if is_chain else _by_reach(nodes))[:most]
    new = {ROOT: ROOT} | {node: i for i, node in enumerate(order)}
    return [(nodes[node][0], new[nodes[node][1]], *nodes[node][2:]) for node in order]


def _by_reach(nodes: Sequence[_Row]) -> list[int]:
    """All nodes, those first that the target comes to most often, by the drafters' own words."""
    reach: list[float] = []
    for _, parent, q, _ in nodes:
        reach.append(q if parent == ROOT else reach[parent] + q)
    # no node is likelier than its parent, which has the smaller index, and equals keep their order
    return sorted(range(len(reach)), key=lambda node: -reach[node])


def _likeliest_chain(nodes: Sequence[_Row]) -> list[int]:
    best: dict[int, int] = {}
    for node, (_, parent, q, _) in enumerate(nodes):
        if parent not in best or q > nodes[best[parent]][2]:
            best[parent] = node
    chain, at = [], ROOT
    while at in best:
        at = best[at]
        chain.append(at)
    return chain
