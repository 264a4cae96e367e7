"""Uniting in C++ equals the naive union: node for node, to the bit, in the same order."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_specrollout import _core
from vllm_specrollout.step import unite_naively
from vllm_specrollout.trees import build
from vllm_specrollout.types import EMPTY_TREE, ROOT, DraftTree, chain
from vllm_specrollout.worker.unite import unite

# few different values tie a lot; sums of the odd ones depend on the order of adding
LOG_Q = st.one_of(
    st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.5]),
    st.floats(-20.0, 0.0, width=32),
    st.sampled_from([float(np.float32(math.log(1 / 3))), -1e-30, -1e30, -math.inf]),
)
TOKENS = st.one_of(st.integers(0, 2), st.sampled_from([0, 7, -1, 2**31 - 1, -(2**31)]))


def tree_of(nodes: list[tuple[int, int, float, int]]) -> DraftTree:
    """A tree from (token, parent, log_q, source)."""
    token_ids, parents, log_q, source = zip(*nodes, strict=True) if nodes else ((), (), (), ())
    return DraftTree(
        np.asarray(token_ids, np.int32),
        np.asarray(parents, np.int32),
        np.asarray(log_q, np.float32),
        np.asarray(source, np.int32),
    )


@st.composite
def trees(draw: st.DrawFn, max_size: int = 64) -> DraftTree:
    """Any shape, in any order, equal siblings included: the union makes one node of them."""
    size = draw(st.integers(0, draw(st.sampled_from([3, 12, max_size]))))
    reach = draw(st.sampled_from([1, 3, size + 1]))
    return tree_of(
        [
            (
                draw(TOKENS),
                draw(st.integers(max(ROOT, node - reach), node - 1)),
                draw(LOG_Q),
                draw(st.integers(-1, 5)),
            )
            for node in range(size)
        ]
    )


GROUPS = st.lists(st.tuples(st.lists(trees(), max_size=4), st.integers(-1, 130)), max_size=4)


def assert_same(united: list[DraftTree], expected: list[DraftTree]) -> None:
    assert len(united) == len(expected)
    for tree, naive in zip(united, expected, strict=True):
        for column in ("token_ids", "parents", "log_q", "source"):
            ours, theirs = getattr(tree, column), getattr(naive, column)
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes(), column


@settings(max_examples=500, deadline=None)
@given(GROUPS)
@example([([chain([1, 2, 3], 0), chain([1, 2, 3], 1)], 64)])
@example([([EMPTY_TREE, chain([1], 1)], 64), ([EMPTY_TREE, EMPTY_TREE], 8), ([], 3)])
@example([([chain(list(range(64)), 0), chain(list(range(64, 128)), 1, 0.5)], 64)])
@example([([tree_of([(token, ROOT, -1.0, 0) for token in range(64)])] * 2, 64)])
def test_every_tree_equals_the_naive_union(groups: list[tuple[list[DraftTree], int]]) -> None:
    batch, max_nodes = [group for group, _ in groups], [most for _, most in groups]
    assert_same(unite(batch, max_nodes), unite_naively(batch, max_nodes))


@settings(deadline=None)
@given(trees(), st.integers(2, 5))
def test_a_tree_united_with_itself_is_the_tree_in_order(tree: DraftTree, copies: int) -> None:
    once, often = unite([[tree], [tree] * copies], [64, 64])
    assert_same([often], [once])
    assert build.is_ordered(once)


def test_pieces_of_larger_arrays_are_read_where_they_lie() -> None:
    whole = chain([1, 2, 3, 4, 5])
    piece = DraftTree(whole.token_ids[2:4], whole.parents[:2], whole.log_q[2:4], whole.source[2:4])
    other = chain([3, 9], source=1, probability=0.5)
    assert_same(unite([[piece, other]], [8]), unite_naively([[piece, other]], [8]))


def test_a_united_tree_does_not_change_with_its_parts() -> None:
    parts = [chain([1, 2]), chain([1, 3], source=1)]
    (united,) = unite([parts], [8])
    before = united.token_ids.tolist()
    parts[0].token_ids[:] = 7
    unite([[chain([5, 5, 5]), chain([6])]], [8])
    assert united.token_ids.tolist() == before


@pytest.mark.parametrize("parent", [0, 1, -2])
def test_a_parent_that_does_not_come_before_its_child_is_refused(parent: int) -> None:
    with pytest.raises(ValueError, match=f"node 0 has parent {parent}, which does not come before it"):
        unite([[tree_of([(1, parent, -1.0, 0)]), chain([2])]], [8])


def test_arrays_that_are_not_what_a_tree_holds_are_refused() -> None:
    tree = chain([1, 2])
    wide = DraftTree(tree.token_ids.astype(np.int64), tree.parents, tree.log_q, tree.source)
    with pytest.raises(ValueError, match="token_ids of tree 1 is not a contiguous array of int32"):
        unite([[tree, wide]], [8])
    apart = DraftTree(tree.token_ids, np.zeros(4, np.int32)[::2], tree.log_q, tree.source)
    with pytest.raises(ValueError, match="parents of tree 0 is not a contiguous array"):
        unite([[apart, tree]], [8])
    short = DraftTree(tree.token_ids, tree.parents, tree.log_q[:1], tree.source)
    with pytest.raises(ValueError, match="log_q of tree 1 does not have one entry per node"):
        unite([[tree, short]], [8])


@pytest.mark.parametrize("counts", [[1], [3], [2, 1], [-1, 3], []])
def test_trees_that_belong_to_no_request_are_refused(counts: list[int]) -> None:
    pair = [chain([1]), chain([2])]
    columns = [[getattr(tree, name) for tree in pair] for name in ("token_ids", "parents", "log_q", "source")]
    with pytest.raises(ValueError, match="add up to the number of trees"):
        _core.unite(*columns, counts, [8] * len(counts))


def test_lists_of_different_lengths_are_refused() -> None:
    ids, floats = [np.zeros(1, np.int32)], [np.zeros(1, np.float32)]
    with pytest.raises(ValueError, match="one array per tree"):
        _core.unite(ids, [], floats, ids, [1], [8])
    with pytest.raises(ValueError, match="one number per request"):
        _core.unite(ids, ids, floats, ids, [1], [8, 8])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_uniting_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    sources = ["csrc/tests/test_unite.cc", "csrc/core/unite.cc"]
    program = tmp_path / "test_unite"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-Icsrc"]
    flags.append("-fno-sanitize-recover=all")
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], cwd=root, check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
