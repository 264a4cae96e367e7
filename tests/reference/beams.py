"""Trees of beams, one node at a time: what `vllm_specrollout.drafters.beams` computes for a batch on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    token: int
    # among all nodes that were looked at; -1: the root
    parent: int
    # logarithm of the probability that the target walks down to it
    joint: float


def grown(
    children_of: Callable[[tuple[int, ...]], list[tuple[int, float]]],
    depth: int,
    beam: int,
    ends: set[int],
    *,
    is_chain: bool = False,
) -> list[Node]:
    """All nodes that are looked at: of each level the `beam` likeliest ones go on.

    Args:
        children_of: path of tokens -> its children and their log probabilities, the likeliest ones first.
        ends: tokens that are not drafted.
        is_chain: the first child of the first node goes on alone.
    """
    nodes: list[Node] = []
    going: list[tuple[int, tuple[int, ...], float]] = [(-1, (), 0.0)]
    for _ in range(depth):
        level: list[tuple[int, tuple[int, ...]]] = []
        for parent, path, joint in going:
            children = children_of(path)[:1] if is_chain else children_of(path)
            for token, log_p in children:
                if token not in ends:
                    level.append((len(nodes), (*path, token)))
                    nodes.append(Node(token, parent, joint + log_p))
        level.sort(key=lambda one: -nodes[one[0]].joint)
        going = [(node, path, nodes[node].joint) for node, path in level[:beam]]
    return nodes


def comb(levels: list[list[tuple[int, float]]], ends: set[int], *, is_chain: bool = False) -> list[Node]:
    """All nodes of a comb: each level's children hang below the first one of the level above, if that is drafted.

    Args:
        levels: of each level the children and their log probabilities, the likeliest ones first.
    """
    nodes: list[Node] = []
    parent, joint = -1, 0.0
    for children in levels:
        first = len(nodes)
        for token, log_p in children[:1] if is_chain else children:
            if token not in ends:
                nodes.append(Node(token, parent, joint + log_p))
        if children[0][0] in ends:
            break
        parent, joint = first, nodes[first].joint
    return nodes


def best(nodes: list[Node], count: int) -> list[Node]:
    """The `count` likeliest of them; a node's ancestors are at least as likely, and come before it."""
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i].joint)[:count]
    place = {node: i for i, node in enumerate(order)} | {-1: -1}
    return [Node(nodes[i].token, place[nodes[i].parent], nodes[i].joint) for i in order]
