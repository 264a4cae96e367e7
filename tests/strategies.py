"""Random inputs that several tests share."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st


@st.composite
def tree_parents(draw: st.DrawFn, max_nodes: int = 16) -> list[int]:
    """Parents of a random tree, chains and stars included; parents come before their children."""
    n = draw(st.integers(0, max_nodes))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


@dataclass(frozen=True)
class Layout:
    """A batch as the runner would lay it out, with disjoint blocks per request."""

    row_start: list[int]
    base: list[int]
    trees: list[list[int]]
    block_table: list[list[int]]
    block_size: int
    scratch: list[int]
    zero_block: int


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 4, max_nodes: int = 16) -> Layout:
    """Prefill chunks, plain decodes, chains and trees, at any offset within their blocks."""
    block_size = draw(st.sampled_from([1, 2, 4, 32]))
    trees = draw(st.lists(tree_parents(max_nodes), min_size=1, max_size=max_requests))
    row_start, base, table, block = [0], [], [], 1
    for parents in trees:
        known = draw(st.integers(1, 9))
        base.append(draw(st.integers(0, 70)))
        row_start.append(row_start[-1] + known + len(parents))
        blocks = (base[-1] + known + len(parents)) // block_size + 1
        table.append(list(range(block, block + blocks)))
        block += blocks
    widest = max(map(len, table))
    table = [row + [0] * (widest - len(row)) for row in table]
    return Layout(row_start, base, trees, table, block_size, list(range(block, block + 2000)), 0)
