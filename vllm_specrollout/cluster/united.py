"""One request's drafts from several drafters elsewhere become one tree. Pure.

What belongs here: the union of their trees, whose nodes keep the word of the drafter that believes in them most. It is
verified in one pass (SpecActor 4.2, where each drafter has a verifier of its own). What other drafters propose is
merged later, by the budget (`trees.batch.merge_select`), which takes sources for granted and has one chain for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_specrollout.cluster.received import Fitting
from vllm_specrollout.types import ROOT


def united(drafts: Sequence[Fitting], most: int, is_chain: bool) -> Fitting:
    """The union: nodes with the same tokens from the root down are one.

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
