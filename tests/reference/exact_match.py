"""The specification of exact-match verification (csrc/core/walk.h).

Sampling one token is argmax(logits' + noise(seed, position)): deterministic once the noise is fixed. So the target
samples its own token at every node, with the noise of that node's position, and we walk from the root as long as the
sampled token is one of the node's children. The tokens walked, and the last one sampled, are what plain decoding would
have produced. (SpecActor, section 2, calls this exact matching; no probability of the drafter enters.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specrollout.types import ROOT, DraftTree, IntArray


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of one request's draft."""

    # [A] indices of the accepted nodes, from the root down
    accepted: IntArray
    # the token sampled at the last accepted node (at the root if none was)
    bonus_token: int

    def output(self, tree: DraftTree) -> list[int]:
        """The tokens this step yields: the accepted ones and the bonus token."""
        return [*tree.token_ids[self.accepted].tolist(), self.bonus_token]


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
