"""The naive layout, checked against what it is for: each node must see its ancestors and nobody else."""

from hypothesis import given

from tests.reference import layout as naive
from tests.reference.trees import path_to
from tests.strategies import Layout, batches, tree_parents


def _expand(b: Layout) -> naive.Layout:
    return naive.expand(b.row_start, b.base, b.trees, b.block_table, b.block_size, b.scratch, b.zero_block)


@given(tree_parents())
def test_paths_end_at_every_leaf_once_and_cover_all_nodes(parents: list[int]) -> None:
    found = list(naive.paths(parents))
    leaves = sorted(set(range(len(parents))) - set(parents))
    assert sorted(path[-1] for path in found) == leaves
    assert {node for path in found for node in path} == set(range(len(parents)))


def test_the_first_path_follows_the_first_child() -> None:
    #        0        3
    #      1   2        4
    assert list(naive.paths([-1, 0, 0, -1, 3])) == [[0, 1], [0, 2], [3, 4]]


@given(batches())
def test_every_row_is_a_query_exactly_once(b: Layout) -> None:
    out = _expand(b)
    assert sorted(out.query_rows) == list(range(b.row_start[-1]))
    assert out.query_start[-1] == b.row_start[-1]


@given(batches())
def test_every_query_finds_its_context_its_ancestors_and_itself_in_order(b: Layout) -> None:
    """Simulates the cache: a slot holds (request, position) of context, or a batch row."""
    out = _expand(b)
    size = b.block_size
    cache: dict[int, object] = {}
    for r, base in enumerate(b.base):
        for p in range(base):
            cache[b.block_table[r][p // size] * size + p % size] = ("context", r, p)
    for source, target in out.copies:
        for i in range(size):
            cache[target * size + i] = cache.get(source * size + i)
    for row, slot in out.writes:
        cache[slot] = ("row", row)
    for path in range(len(out.seq_lens)):
        queries = out.query_rows[out.query_start[path] : out.query_start[path + 1]]
        r = next(r for r in range(len(b.trees)) if b.row_start[r] <= queries[0] < b.row_start[r + 1])
        known = b.row_start[r + 1] - b.row_start[r] - len(b.trees[r])
        for i, row in enumerate(queries):
            position = out.seq_lens[path] - len(queries) + i
            seen = [cache[out.tables[path][p // size] * size + p % size] for p in range(position + 1)]
            assert seen == _wanted(b, r, known, row)


def _wanted(b: Layout, r: int, known: int, row: int) -> list[object]:
    begin = b.row_start[r]
    context: list[object] = [("context", r, p) for p in range(b.base[r])]
    if row < begin + known:
        return context + [("row", q) for q in range(begin, row + 1)]
    ancestors = path_to(b.trees[r], row - begin - known)
    return context + [("row", begin + i) for i in range(known)] + [("row", begin + known + n) for n in ancestors]


@given(batches())
def test_no_two_paths_write_one_slot_and_scratch_is_counted_right(b: Layout) -> None:
    out = _expand(b)
    slots = [slot for _, slot in out.writes]
    assert len(slots) == len(set(slots))
    used = {slot // b.block_size for slot in slots} & set(b.scratch)
    roots = [b.base[r] + b.row_start[r + 1] - b.row_start[r] - len(t) - 1 for r, t in enumerate(b.trees)]
    needed = sum(naive.scratch_needed(t, root, b.block_size) for t, root in zip(b.trees, roots, strict=True))
    assert len(used) == needed
