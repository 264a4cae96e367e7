"""Exact-match verification: the output is what plain decoding yields, whatever was drafted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.exact_match import verify
from tests.strategies import tree_parents
from tests.trees import chain
from vllm_specrollout.types import ROOT, DraftTree


def _plain_decode(prefix: tuple[int, ...], steps: int) -> list[int]:
    """A deterministic target: the next token is a function of all tokens before it, as with fixed noise."""
    out: list[int] = []
    for _ in range(steps):
        out.append(_target((*prefix, *out)))
    return out


def _target(prefix: tuple[int, ...]) -> int:
    return hash(prefix) % 3


@given(tree_parents(24), st.data())
def test_whatever_is_drafted_the_output_is_a_prefix_of_plain_decoding(parents: list[int], data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    keep: list[int] = []
    for i, parent in enumerate(parents):  # siblings must differ: drop later equals, with all that hangs on them
        is_new = all(parents[j] != parent or tokens[j] != tokens[i] for j in keep)
        if is_new and (parent == ROOT or parent in keep):
            keep.append(i)
    index = {old: new for new, old in enumerate(keep)}
    tree = DraftTree(
        np.asarray([tokens[i] for i in keep], dtype=np.int32),
        np.asarray([index.get(parents[i], ROOT) for i in keep], dtype=np.int32),
        np.zeros(len(keep), dtype=np.float32),
        np.zeros(len(keep), dtype=np.int32),
    )
    context = (1, 2)
    sampled = [_target(context)]
    for node in range(tree.size):
        path, at = [], node
        while at != ROOT:
            path.insert(0, int(tree.token_ids[at]))
            at = int(tree.parents[at])
        sampled.append(_target((*context, *path)))
    output = verify(tree, sampled).output(tree)
    assert output == _plain_decode(context, len(output))


def test_a_right_chain_is_accepted_whole_and_yields_one_token_more() -> None:
    verdict = verify(chain([5, 6, 7]), [5, 6, 7, 8])
    assert verdict.accepted.tolist() == [0, 1, 2]
    assert verdict.bonus_token == 8


def test_a_wrong_first_token_yields_the_targets_own() -> None:
    tree = chain([5, 6])
    assert verify(tree, [9, 6, 7]).output(tree) == [9]


def test_without_a_draft_one_token_is_sampled() -> None:
    assert verify(chain([]), [3]).output(chain([])) == [3]
