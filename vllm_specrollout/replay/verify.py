"""What the target makes of a batch's trees when the answers are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_specrollout import _core
from vllm_specrollout.types import IntArray, TreeBatch, VerifyResult


def verified(trees: TreeBatch, truths: Sequence[IntArray]) -> VerifyResult:
    """How far each tree agrees with the truth.

    Args:
        truths: [R] each request's tokens from here on.
    """
    lengths = np.minimum(trees.sizes, [len(truth) for truth in truths]).astype(np.int32)
    ahead = np.zeros((len(lengths), lengths.max(initial=0)), dtype=np.int32)
    for row, truth, length in zip(ahead, truths, lengths.tolist(), strict=True):
        row[:length] = truth[:length]
    return VerifyResult(*_core.follow(trees.node_start, trees.parents, trees.token_ids, ahead, lengths))
