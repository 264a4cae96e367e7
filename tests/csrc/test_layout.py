"""The C++ layout, walk and block copies against their naive twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import layout as naive
from tests.reference.exact_match import verify
from tests.strategies import Layout, batches, tree_parents
from tests.trees import batch_of, drafted
from vllm_specrollout import _core
from vllm_specrollout.types import DraftTree


def _int32(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _node_start(trees: list[list[int]]) -> np.ndarray:
    return _int32([0, *np.cumsum([len(t) for t in trees])])


def _expand(b: Layout) -> dict[str, np.ndarray]:
    flat = _int32([p for tree in b.trees for p in tree])
    return _core.expand_paths(
        _int32(b.row_start), _int32(b.base), _node_start(b.trees), flat, _int32(b.block_table), b.block_size,
        _int32(b.scratch), b.zero_block,
    )  # fmt: skip


@given(batches())
def test_the_layout_equals_its_naive_twin(b: Layout) -> None:
    twin = naive.expand(b.row_start, b.base, b.trees, b.block_table, b.block_size, b.scratch, b.zero_block)
    fast = _expand(b)
    for name in ("query_rows", "query_start", "seq_lens", "node_path", "depths"):
        assert fast[name].tolist() == getattr(twin, name), name
    assert fast["inverse"][fast["query_rows"]].tolist() == list(range(b.row_start[-1]))
    assert sorted(zip(fast["write_rows"].tolist(), fast["write_slots"].tolist(), strict=True)) == sorted(twin.writes)
    assert list(zip(fast["copy_from"].tolist(), fast["copy_to"].tolist(), strict=True)) == twin.copies
    for row, table in zip(fast["tables"].tolist(), twin.tables, strict=True):
        assert row[: len(table)] == table


@given(batches())
def test_nodes_stand_in_the_rows_behind_their_requests_known_tokens(b: Layout) -> None:
    fast = _expand(b)
    known = [end - begin - len(own) for begin, end, own in zip(b.row_start, b.row_start[1:], b.trees, strict=False)]
    roots = [base + count - 1 for base, count in zip(b.base, known, strict=True)]
    depths = iter(fast["depths"].tolist())
    rows = [
        begin + count + i
        for begin, count, own in zip(b.row_start, known, b.trees, strict=False)
        for i in range(len(own))
    ]
    assert fast["root"].tolist() == roots
    assert fast["node_rows"].tolist() == rows
    assert fast["node_positions"].tolist() == [
        root + next(depths) for root, own in zip(roots, b.trees, strict=True) for _ in own
    ]
    starts = fast["query_start"].tolist()
    assert [starts[path] for path in fast["first_path"].tolist()] == list(b.row_start[:-1])
    assert fast["is_in_order"] == (fast["query_rows"].tolist() == list(range(b.row_start[-1])))


@given(st.lists(tree_parents(24), max_size=4))
def test_every_row_knows_its_request_and_its_depth(trees: list[list[int]]) -> None:
    requests, depths = [], []
    for r, parents in enumerate(trees):
        own = [0]
        for parent in parents:
            own.append(own[parent + 1] + 1)
        requests += [r] * len(own)
        depths += own
    flat = _int32([d for d in depths if d])
    row_request, row_depth = _core.row_layout(_node_start(trees), flat)
    assert (row_request.tolist(), row_depth.tolist()) == (requests, depths)


@given(st.lists(tree_parents(24), max_size=4), st.data())
def test_a_row_takes_its_requests_entry_of_its_own_depth(trees: list[list[int]], data) -> None:
    lists = [
        None if data.draw(st.booleans()) else np.arange(25, dtype=np.int64) * 7 + 1000 * r for r in range(len(trees))
    ]
    start = _node_start(trees)
    rows = sum(map(len, trees)) + len(trees)
    depths = _int32(data.draw(st.lists(st.integers(0, 24), min_size=rows, max_size=rows)))
    owner = [r for r, own in enumerate(trees) for _ in range(len(own) + 1)]
    wanted = [0 if lists[r] is None else 7 * d + 1000 * r for r, d in zip(owner, depths.tolist(), strict=True)]
    assert _core.by_depth(lists, start, depths).tolist() == wanted


@given(st.lists(tree_parents(24), max_size=4), st.data(), st.sampled_from([1, 4, 32, 128]))
def test_trees_do_without_branches_where_those_before_them_took_the_scratch(trees, data, block_size) -> None:
    roots = [data.draw(st.integers(0, 300)) for _ in trees]
    free = most = data.draw(st.integers(0, 40))
    wanted = []
    for parents, root in zip(trees, roots, strict=True):
        needed = naive.scratch_needed(parents, root, block_size)
        wanted.append(needed > free)
        free -= 0 if needed > free else needed
    start = _int32(np.cumsum([0, *map(len, trees)]))
    flat = _int32([parent for parents in trees for parent in parents])
    assert _core.without_scratch(start, flat, _int32(roots), block_size, most).tolist() == wanted


@given(st.lists(drafted(), min_size=1, max_size=5), st.data())
def test_the_walk_equals_its_naive_twin(trees: list[DraftTree], data) -> None:
    # few tokens, so that matches are frequent
    sampled = [data.draw(st.lists(st.integers(0, 3), min_size=t.size + 1, max_size=t.size + 1)) for t in trees]
    flat = np.asarray([t for own in sampled for t in own], dtype=np.int64)
    batch = batch_of(trees)
    output, rows, counts, accepted = _core.walk(batch.node_start, batch.parents, batch.token_ids, flat)
    verdicts = [verify(tree, own) for tree, own in zip(trees, sampled, strict=True)]
    assert counts.tolist() == [len(v.accepted) for v in verdicts]
    assert accepted.tolist() == [node for v in verdicts for node in v.accepted]
    for r, (verdict, tree) in enumerate(zip(verdicts, trees, strict=True)):
        wanted = verdict.output(tree)
        assert output[r].tolist() == wanted + [-1] * (output.shape[1] - len(wanted))
        assert flat[rows[r][: len(wanted)]].tolist() == wanted


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(5, 9)), max_size=6), st.integers(1, 3))
def test_blocks_are_copied_whole_in_every_layer_and_nothing_else_moves(copies, layers) -> None:
    caches = [np.random.default_rng(i).random((10, 2, 3)) for i in range(layers)]
    wanted = [cache.copy() for cache in caches]
    for cache in wanted:
        for source, target in copies:
            cache[target] = cache[source]
    _core.copy_blocks(
        np.asarray([c.ctypes.data for c in caches], dtype=np.uint64),
        np.asarray([c.strides[0] for c in caches], dtype=np.int64),
        np.asarray([s for s, _ in copies], dtype=np.int64),
        np.asarray([t for _, t in copies], dtype=np.int64),
    )
    for cache, copied in zip(caches, wanted, strict=True):
        np.testing.assert_array_equal(cache, copied)
