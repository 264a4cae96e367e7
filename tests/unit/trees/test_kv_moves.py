import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import layout as naive
from tests.reference.trees import path_to
from tests.strategies import Layout, batches
from vllm_specrollout.trees.kv_moves import plan_moves as plan


@given(batches(), st.data())
def test_after_the_commit_the_accepted_nodes_stand_in_consecutive_slots(b: Layout, data: st.DataObject) -> None:
    """Spare blocks start as NaN; whatever path wins, the request's own slots hold context, root and path."""
    out = naive.expand(b.row_start, b.base, b.trees, b.block_table, b.block_size, b.scratch, b.zero_block)
    size = b.block_size
    cache = np.full(((max(b.scratch) + 1) * size,), np.nan)
    for r, base in enumerate(b.base):
        for p in range(base):
            cache[b.block_table[r][p // size] * size + p % size] = -1000.0 * (r + 1) - p
    for source, target in out.copies:
        cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]
    for row, slot in out.writes:
        cache[slot] = row
    accepted = [path_to(tree, data.draw(st.integers(-1, len(tree) - 1))) for tree in b.trees]
    widest = max(map(len, out.tables))
    starts = np.cumsum([0, *map(len, b.trees)])
    home = [out.node_path[starts[r] + a[-1]] if a else -1 for r, a in enumerate(accepted)]
    first_path = [out.query_start.index(b.row_start[r]) for r in range(len(b.trees))]
    roots = [b.base[r] + b.row_start[r + 1] - b.row_start[r] - len(t) - 1 for r, t in enumerate(b.trees)]
    tables = [table + [0] * (widest - len(table)) for table in out.tables]
    columns = ([len(a) for a in accepted], home, first_path, roots, tables, b.block_table)
    moves = plan(*(np.asarray(values, dtype=np.int32) for values in columns), size)
    for source, target in zip(moves.source_blocks.tolist(), moves.target_blocks.tolist(), strict=True):
        cache[target * size : (target + 1) * size] = cache[source * size : (source + 1) * size]
    for r, nodes in enumerate(accepted):
        known = b.row_start[r + 1] - b.row_start[r] - len(b.trees[r])
        wanted = [-1000.0 * (r + 1) - p for p in range(b.base[r])]
        wanted += [b.row_start[r] + i for i in range(known)]
        wanted += [b.row_start[r] + known + node for node in nodes]
        got = [cache[b.block_table[r][p // size] * size + p % size] for p in range(len(wanted))]
        assert got == wanted
