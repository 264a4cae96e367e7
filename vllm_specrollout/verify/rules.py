"""Exact-match verification, the naive way: this file is the specification, csrc/core/walk the fast twin.

Sampling one token is argmax(logits' + noise(seed, position)): deterministic once the noise is fixed. So the target
samples its own token at every node, with the noise of that node's position, and we walk from the root as long as the
sampled token is one of the node's children. The tokens walked, and the last one sampled, are what plain decoding would
have produced. (SpecActor, section 2, calls this exact matching; no probability of the drafter enters.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout.types import ROOT, DraftTree, IntArray, Verdict


def verify(tree: DraftTree, sampled: Sequence[int]) -> Verdict:
    """Judge one draft.

    Args:
        tree: the draft, N nodes.
        sampled: [N + 1] the target's own token after the root, then after each node.
    """
    node = ROOT
    accepted: list[int] = []
    while True:
        wanted = int(sampled[node + 1])
        matching = [i for i in range(tree.size) if tree.parents[i] == node and tree.token_ids[i] == wanted]
        if not matching:
            return Verdict(np.asarray(accepted, dtype=np.int32), wanted)
        node = matching[0]
        accepted.append(node)


def accepted_path(tree: DraftTree, accepted_tokens: Sequence[int]) -> IntArray:
    """Which nodes were accepted, told from the tokens alone: what a step yielded, without its last (bonus) token.

    Args:
        tree: the draft that was verified.
        accepted_tokens: [A] the accepted tokens, from the root down.

    Returns:
        [A] node indices.

    Raises:
        ValueError: the tokens are not a path of the tree.
    """
    node = ROOT
    path: list[int] = []
    for token in accepted_tokens:
        children = np.nonzero((tree.parents == node) & (tree.token_ids == token))[0]
        if not len(children):
            raise ValueError(f"token {int(token)} does not follow node {node} in the draft")
        node = int(children[0])
        path.append(node)
    return np.asarray(path, dtype=np.int32)
