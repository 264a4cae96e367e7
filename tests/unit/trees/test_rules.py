"""Exact-match verification: the output is what plain decoding yields, whatever was drafted."""

from hypothesis import given
from hypothesis import strategies as st

from tests.reference.exact_match import verify
from tests.reference.trees import path_to
from tests.strategies import tree_parents
from tests.trees import chain, tree_of
from vllm_specrollout.types import ROOT


def _target(prefix: tuple[int, ...]) -> int:
    """The next token is a function of all tokens before it, as with fixed noise."""
    return hash(prefix) % 3


def _plain_decode(prefix: tuple[int, ...], steps: int) -> list[int]:
    out: list[int] = []
    for _ in range(steps):
        out.append(_target((*prefix, *out)))
    return out


@given(tree_parents(24), st.data())
def test_whatever_is_drafted_the_output_is_a_prefix_of_plain_decoding(parents: list[int], data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    keep: list[int] = []
    for i, parent in enumerate(parents):  # siblings must differ: drop later equals, with all that hangs on them
        is_new = all(parents[j] != parent or tokens[j] != tokens[i] for j in keep)
        if is_new and (parent == ROOT or parent in keep):
            keep.append(i)
    index = {old: new for new, old in enumerate(keep)}
    tree = tree_of([index.get(parents[i], ROOT) for i in keep], [tokens[i] for i in keep], [1.0] * len(keep))
    context = (1, 2)
    paths = [tree.token_ids[path_to(tree.parents, node)].tolist() for node in range(tree.size)]
    sampled = [_target((*context, *path)) for path in ([], *paths)]
    output = verify(tree, sampled).output(tree)
    assert output == _plain_decode(context, len(output))


def test_a_right_chain_is_accepted_whole_and_yields_one_token_more() -> None:
    verdict = verify(chain([5, 6, 7]), [5, 6, 7, 8])
    assert verdict.accepted.tolist() == [0, 1, 2]
    assert verdict.bonus_token == 8
