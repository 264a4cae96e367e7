"""The mask of a draft tree, node by node: which nodes see which. What makes one for an engine is a kernel.

May enter: the carriers and numpy. May not: torch, vLLM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_specrollout.types import MOST_NODES, ROOT, IntArray


def ancestor_mask(parents: IntArray) -> npt.NDArray[np.uint64]:
    """[N] bit j (least significant first) of row i is set if and only if node j is node i or an ancestor of it.

    Raises:
        ValueError: more nodes than a word has bits.
    """
    if len(parents) > MOST_NODES:
        raise ValueError(f"{len(parents)} nodes do not fit the {MOST_NODES} bits of a mask")
    rows: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        rows.append((1 << node) | (0 if parent == ROOT else rows[parent]))
    return np.asarray(rows, dtype=np.uint64)
