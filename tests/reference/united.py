"""The specification of `cluster.united`: trees as sets of paths."""

from __future__ import annotations

import math
from collections.abc import Sequence

Path = tuple[int, ...]
Row = tuple[int, int, float, int]
"""Token, parent, log probability, whether it is a first choice."""


def paths_of(tree: Sequence[Row]) -> list[Path]:
    """Each node's tokens from the root down."""
    paths: list[Path] = []
    for token, parent, _, _ in tree:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def united(drafts: Sequence[Sequence[Row]], most: int, is_chain: bool) -> list[tuple[Path, float, int]]:
    """The union's nodes in order: path, natural log of its probability given its parent, whether a first choice."""
    found: dict[Path, list[tuple[float, int]]] = {}
    for tree in drafts:
        for path, (_, _, q, first) in zip(paths_of(tree), tree, strict=True):
            found.setdefault(path, []).append((q, first))
    q = {path: max(value for value, _ in own) for path, own in found.items()}

    def reach(path: Path) -> float:
        total = 0.0
        for level in range(1, len(path) + 1):
            total += q[path[:level]]
        return total

    chosen: list[Path] = []
    while len(chosen) < most:
        above: list[Path] = chosen[-1:] or [()] if is_chain else [(), *chosen]
        open_paths = [path for path in found if path[:-1] in above and path not in chosen]
        if not open_paths:
            break
        # the first of equals, in the order in which they came
        best = max(open_paths, key=(lambda path: q[path]) if is_chain else reach)
        chosen.append(best)
    assert all(math.isfinite(q[path]) for path in chosen)
    return [(path, q[path], int(any(first for _, first in found[path]))) for path in chosen]
