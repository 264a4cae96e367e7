"""The n-gram drafter on top of the C++ index: requests come, grow, change and go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.drafters import ask
from tests.reference import trees as made
from tests.reference.history import NaiveHistory
from vllm_specrollout import drafters
from vllm_specrollout.config import SpecRolloutConfig
from vllm_specrollout.config.drafters import NgramConfig
from vllm_specrollout.drafters.ngram import NgramDrafter
from vllm_specrollout.types import ROOT, DraftMode, DraftTree, RequestView

CONFIG = NgramConfig(min_match=1, max_match=4)


def make_view(
    text: list[int], request_id: str = "a", room: int = 1000, shape: DraftMode = DraftMode.TREE
) -> RequestView:
    return RequestView(request_id, np.asarray(text, dtype=np.int32), 0, room, shape)


def draft(drafter: NgramDrafter, view: RequestView, *bounds: int, is_chain: bool = False) -> DraftTree:
    (tree,) = ask(drafter, [view], *bounds, is_chain=is_chain)
    return tree


def specified(text: list[int], *bounds: int) -> DraftTree:
    """What the specification drafts for a text of its own."""
    index = NaiveHistory(CONFIG)
    index.append(index.open(0), text)
    return index.propose(0, *bounds)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # request
        st.lists(st.integers(0, 3), max_size=6),  # its new tokens
        st.sampled_from(("grow", "forget", "rewrite")),
        st.tuples(st.integers(0, 20), st.integers(0, 6), st.booleans()),
    ),
    max_size=20,
)


@given(STEPS)
def test_drafts_depend_on_the_requests_present_tokens_alone(steps) -> None:
    drafter = NgramDrafter(CONFIG, max_nodes=12, source=1)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for request, new, what, (max_nodes, max_depth, is_chain) in steps:
        if what == "forget":
            drafter.forget(str(request))
        texts[request] = new if what == "rewrite" else texts[request] + new
        views = [make_view(text, str(key)) for key, text in texts.items()]
        trees = ask(drafter, views, max_nodes, max_depth, is_chain=is_chain)
        for view, tree in zip(views, trees, strict=True):
            made.check(tree)
            assert set(tree.source.tolist()) <= {1}
            nodes = min(max_nodes, max_depth if is_chain else max_nodes, 12)
            text = view.token_ids.tolist()
            made.assert_same(tree, specified(text, nodes, max_depth, is_chain))


@given(st.lists(st.integers(0, 3), max_size=40))
def test_every_path_occurred_after_the_last_token_and_siblings_share_one_probability(text) -> None:
    tree = draft(NgramDrafter(CONFIG), make_view(text), 20, 6)
    for node in range(tree.size):
        wanted = text[-1:] + tree.token_ids[made.path_to(tree.parents, node)].tolist()
        assert any(text[start : start + len(wanted)] == wanted for start in range(len(text)))
    for parent in {ROOT, *range(tree.size)}:
        assert np.exp(tree.log_q[tree.parents == parent]).sum() <= 1 + 1e-5


def test_a_request_that_was_not_asked_for_a_while_catches_up() -> None:
    drafter, text = NgramDrafter(CONFIG), [1, 2, 3]
    draft(drafter, make_view(text))
    text += [1, 2, 4, 1]
    assert draft(drafter, make_view(text), 0, 8).size == 0
    text += [2]
    made.assert_same(draft(drafter, make_view(text)), specified(text, 16, 8))


def test_a_draft_never_outgrows_the_tokens_the_request_may_still_make() -> None:
    text = [1, 2, 3, 4, 5] * 6
    sizes = [draft(NgramDrafter(CONFIG), make_view(text, room=room), 9, 9, is_chain=True).size for room in range(5)]
    assert sizes == [0, 0, 1, 2, 3]


def test_the_view_alone_can_forbid_branches_or_drafts() -> None:
    text = [1, 2, 1, 3, 1, 4, 1]
    assert made.num_paths(draft(NgramDrafter(CONFIG), make_view(text)).parents) > 1
    assert made.num_paths(draft(NgramDrafter(CONFIG), make_view(text, shape=DraftMode.CHAIN)).parents) == 1
    assert draft(NgramDrafter(CONFIG), make_view(text, shape=DraftMode.OFF)).size == 0


def test_the_engine_gets_history_and_ngram_by_default() -> None:
    history, ngram = drafters.build(SpecRolloutConfig(max_draft_tokens=3))
    assert (history.name, ngram.name) == ("history", "ngram")
    tree = draft(ngram, make_view([1, 2, 3] * 5))
    assert tree.size == 3
    assert tree.source.tolist() == [1, 1, 1]
