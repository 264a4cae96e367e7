"""The naive twin of csrc/core/layout: how draft trees lie in memory for one attention call.

The stock attention kernel knows sequences, not trees. So every root-to-leaf path becomes a sequence of its own: the
first path (the one of best children) lives in the request's own KV cache blocks, each further one shares the blocks
before position root + 1 and ends in scratch blocks. This file is the specification; the engine runs the C++ version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_specrollout.types import ROOT


@dataclass(slots=True)
class Layout:
    """Plain lists, one entry per query, path, write or copy; see csrc/core/layout.h for the fields."""

    query_rows: list[int] = field(default_factory=list)
    query_start: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    node_path: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


def paths(parents: Sequence[int]) -> Iterator[list[int]]:
    """Root-to-leaf paths, depth first, children in index order: the first is the path of best children."""

    def below(node: int, path: list[int]) -> Iterator[list[int]]:
        children = [i for i, parent in enumerate(parents) if parent == node]
        if not children and path:
            yield path
        for child in children:
            yield from below(child, [*path, child])

    yield from below(ROOT, [])


def expand(
    row_start: Sequence[int],
    base: Sequence[int],
    trees: Sequence[Sequence[int]],
    block_table: Sequence[Sequence[int]],
    block_size: int,
    scratch: Sequence[int],
    zero_block: int,
) -> Layout:
    """Lay out a batch.

    Args:
        row_start: [R + 1] first batch row of each request; a request's rows are its known tokens, then its nodes.
        base: [R] position of each request's first row.
        trees: [R] parents of each request's nodes.
        block_table: [R, blocks] physical blocks.
        block_size: tokens per block.
        scratch: physical blocks free for paths beyond the first.
        zero_block: a physical block that holds zeros for ever.
    """
    layout, free = Layout(), list(scratch)
    for r, parents in enumerate(trees):
        rows = list(range(row_start[r], row_start[r + 1]))
        known, nodes = rows[: len(rows) - len(parents)], rows[len(rows) - len(parents) :]
        root = base[r] + len(known) - 1
        layout.depths += [_depth(parents, i) for i in range(len(parents))]
        home = [-1] * len(parents)
        for number, path in enumerate(paths(parents) if parents else [[]]):
            table = list(block_table[r])
            # (row, position) of what this path's attention call must find in its blocks and did not before
            wanted = [(nodes[node], root + 1 + i) for i, node in enumerate(path)]
            if number == 0:
                wanted = [(row, base[r] + i) for i, row in enumerate(known)] + wanted
                layout.query_rows += known
            else:
                first = (root + 1) // block_size
                for block in range(first, (root + len(path)) // block_size + 1):
                    own = free.pop(0)
                    has_context = block == first and first * block_size < base[r]
                    layout.copies.append((table[block] if has_context else zero_block, own))
                    table[block] = own
                known_here = [(row, base[r] + i) for i, row in enumerate(known)]
                wanted = [(row, p) for row, p in known_here if p >= first * block_size] + wanted
            for node in path:
                if home[node] < 0:
                    home[node] = len(layout.seq_lens)
                    layout.query_rows.append(nodes[node])
            layout.writes += [(row, table[p // block_size] * block_size + p % block_size) for row, p in wanted]
            layout.query_start.append(len(layout.query_rows))
            layout.seq_lens.append(root + 1 + len(path))
            layout.tables.append(table[: (root + len(path)) // block_size + 1])
        layout.node_path += home
    return layout


def _depth(parents: Sequence[int], node: int) -> int:
    depth = 1
    while parents[node] != ROOT:
        node, depth = parents[node], depth + 1
    return depth


def scratch_needed(parents: Sequence[int], root: int, block_size: int) -> int:
    """Scratch blocks of a tree whose root stands at position `root`."""
    return sum(
        (root + len(path)) // block_size - (root + 1) // block_size + 1
        for number, path in enumerate(paths(parents))
        if number > 0
    )
