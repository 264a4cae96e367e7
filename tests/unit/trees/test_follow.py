from hypothesis import given
from hypothesis import strategies as st

from tests.reference.trees import check, from_paths, is_ordered, path_to
from vllm_specrollout.trees.follow import below
from vllm_specrollout.types import DraftTree

PATHS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.floats(0.1, 1.0)), max_size=6)


def words(draft: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(draft.token_ids[path_to(draft.parents, i)].tolist()) for i in range(draft.size)]


@given(PATHS, st.lists(st.integers(0, 2), max_size=4))
def test_what_hangs_below_a_path_is_what_a_search_finds(weighted, path: list[int]) -> None:
    draft = from_paths(weighted, 64, 5)
    subtree, passed = below(draft, path)
    held = [tuple(path[:n]) for n in range(len(path) + 1) if n == 0 or tuple(path[:n]) in words(draft)]
    assert passed == len(held) - 1
    if passed < len(path):
        assert subtree is None
        return
    wanted = [word[len(path) :] for word in words(draft) if word[: len(path)] == tuple(path) and len(word) > len(path)]
    assert words(subtree) == wanted
    check(subtree)
    assert is_ordered(subtree)
