"""Trees of several drafters become one: against the naive twin, and by hand."""

from hypothesis import given
from hypothesis import strategies as st

from tests.reference import united as naive
from vllm_specrollout.cluster.received import Fitting, united


@st.composite
def trees(draw: st.DrawFn, is_chain: bool = False) -> Fitting:
    """A tree without double children, whose first child of each node is a first choice."""
    tree = Fitting([], [], [], [])
    taken: dict[int, set[int]] = {}
    for node in range(draw(st.integers(1, 12))):
        parent = node - 1 if is_chain else draw(st.integers(-1, node - 1))
        own = taken.setdefault(parent, set())
        token = draw(st.integers(0, 3))
        if token in own:
            if is_chain:
                break
            continue_at = next((free for free in range(4, 20) if free not in own), 20)
            token = continue_at
        tree.token_ids.append(token)
        tree.parents.append(parent)
        # few values, so that many nodes are equally likely
        tree.log_q.append(draw(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0])))
        tree.is_first.append(not own)
        own.add(token)
    return tree


@given(drafts=st.lists(trees(), min_size=1, max_size=3), most=st.integers(1, 40))
def test_the_union_is_that_of_its_naive_twin(drafts: list[Fitting], most: int) -> None:
    check(drafts, most, is_chain=False)


@given(drafts=st.lists(trees(is_chain=True), min_size=1, max_size=3), most=st.integers(1, 40))
def test_a_union_of_chains_is_a_chain(drafts: list[Fitting], most: int) -> None:
    found = check(drafts, most, is_chain=True)
    assert found.parents == list(range(-1, len(found.parents) - 1))


def check(drafts: list[Fitting], most: int, is_chain: bool) -> Fitting:
    found = united(drafts, most, is_chain)
    rows = list(zip(naive.paths_of(found), found.log_q, found.is_first, strict=True))
    assert rows == naive.united(drafts, most, is_chain)
    return found


def test_a_node_of_two_drafters_keeps_the_higher_word_and_stays_a_first_choice() -> None:
    one = Fitting([5, 6, 7], [-1, 0, -1], [-0.5, -0.1, -2.0], [True, True, False])
    other = Fitting([7, 5, 8], [-1, -1, 1], [-0.25, -1.0, -0.75], [True, False, True])
    assert united([one, other], 64, False) == Fitting(
        [7, 5, 6, 8], [-1, -1, 1, 1], [-0.25, -0.5, -0.1, -0.75], [True, True, True, True]
    )


def test_what_is_left_out_is_what_is_reached_least() -> None:
    one = Fitting([1, 2], [-1, 0], [-1.0, -1.0], [True, True])
    other = Fitting([3, 4], [-1, 0], [-0.5, -2.0], [True, True])
    assert united([one, other], 3, False).token_ids == [3, 1, 2]
