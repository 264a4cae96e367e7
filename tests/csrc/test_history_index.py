"""The C++ history index equals its naive twin to the bit, however its text came, changed and went."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import trees
from tests.reference.history import NaiveHistory
from vllm_specrollout import _core
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.types import DraftTree

# few different tokens repeat a lot; the odd ones out are the extremes of the type
TOKENS = st.one_of(
    st.lists(st.integers(0, 1), max_size=90),
    st.lists(st.integers(0, 3), max_size=140),
    st.lists(st.sampled_from([0, 7, -1, 2**31 - 1, -(2**31)]), max_size=20),
)
WEIGHTS = st.sampled_from([0, 1, 100, 256, 512, 2**31 - 1])
EPOCHS = st.integers(0, 3)
WHICH = st.integers(0, 1000)
CHANGES = st.one_of(
    st.tuples(st.just("set_prompt"), TOKENS),
    st.tuples(st.just("add"), TOKENS, WEIGHTS, EPOCHS),
    st.tuples(st.just("open"), EPOCHS),
    st.tuples(st.just("append"), WHICH, TOKENS),
    st.tuples(st.just("sync"), WHICH, st.integers(0, 140), TOKENS),
    st.tuples(st.just("set_weight"), WHICH, WEIGHTS),
    st.tuples(st.just("remove"), WHICH),
    st.tuples(st.just("retire"), EPOCHS),
)
BOUNDS = st.tuples(st.integers(-1, 40), st.integers(-1, 12), st.booleans(), st.booleans())


@st.composite
def configs(draw: st.DrawFn) -> tuple[HistoryConfig, int]:
    min_match = draw(st.integers(1, 3))
    max_match = min_match + draw(st.sampled_from([0, 1, 2, 5, 12]))
    return HistoryConfig(min_match=min_match, max_match=max_match), draw(st.integers(1, 12))


class Both:
    """The C++ index and its twin, changed alike."""

    def __init__(self, config: HistoryConfig, max_matches: int = MAX_MATCHES) -> None:
        c = config
        self.index = _core.HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=max_matches)
        self.naive = NaiveHistory(config, max_matches)
        self.docs: list[int] = []
        self.texts: dict[int, list[int]] = {}

    def change(self, kind: str, *arguments) -> None:
        if kind in ("append", "sync", "set_weight", "remove"):
            if not self.docs:
                return
            arguments = (self.docs[arguments[0] % len(self.docs)], *arguments[1:])
        getattr(self, kind)(*arguments)

    def set_prompt(self, tokens: list[int]) -> None:
        self.index.set_prompt(as_array(tokens))
        self.naive.set_prompt(tokens)

    def add(self, tokens: list[int], weight: int, epoch: int) -> None:
        self.keep(self.index.add(as_array(tokens), weight, epoch), self.naive.add(tokens, weight, epoch), tokens)

    def open(self, epoch: int) -> None:
        self.keep(self.index.open(epoch), self.naive.open(epoch), [])

    def append(self, doc: int, tokens: list[int]) -> None:
        self.index.append(doc, as_array(tokens))
        self.naive.append(doc, tokens)
        self.texts[doc] = self.texts[doc] + tokens

    def sync(self, doc: int, kept: int, tokens: list[int]) -> None:
        wanted = self.texts[doc][:kept] + tokens
        assert self.index.sync(doc, as_array(wanted)) == self.naive.sync(doc, wanted)
        self.texts[doc] = wanted

    def set_weight(self, doc: int, weight: int) -> None:
        for one in (self.index, self.naive):
            one.set_weight(doc, weight)

    def remove(self, doc: int) -> None:
        for one in (self.index, self.naive):
            one.remove(doc)
        self.docs.remove(doc)

    def retire(self, before_epoch: int) -> None:
        assert self.index.retire(before_epoch) == self.naive.retire(before_epoch)
        self.docs = [doc for doc in self.docs if doc in self.naive.documents]

    def keep(self, doc: int, expected: int, tokens: list[int]) -> None:
        assert doc == expected
        self.docs.append(doc)
        self.texts[doc] = tokens

    def check(self) -> None:
        self.index.check_integrity()
        assert self.index.num_tokens == self.naive.num_tokens
        assert self.index.num_documents == self.naive.num_documents


def as_array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def propose(
    index: _core.HistoryIndex, doc: int, nodes: int, depth: int, chain: bool, siblings: bool, ends: tuple[int, ...] = ()
) -> DraftTree:
    its_ends = (np.asarray([0, len(ends)], np.int32), np.asarray(ends, np.int32))
    node_start, *arrays = _core.propose_history([index], [doc], [nodes], [depth], [chain], siblings, *its_ends)
    assert node_start.tolist() == [0, len(arrays[0])]
    return DraftTree(*arrays, np.zeros(len(arrays[0]), np.int32))


def test_a_prompt_is_stored_once_and_goes_with_the_last_answer_behind_it() -> None:
    both = Both(HistoryConfig())
    for _ in range(2):
        both.set_prompt([1, 2, 3])
        both.open(0)
    assert both.index.num_tokens == 3, "it is stored once"
    for number in range(200):
        both.set_prompt([number + 10] * 300)
        both.open(0)
        both.remove(both.docs[-1])
        both.check()
    assert both.index.num_tokens == 3 + 300 and both.index.nbytes < 1 << 15
    both.set_prompt([])
    both.remove(0)
    assert both.index.num_tokens == 3
    both.remove(1)
    both.check()
    assert both.index.num_tokens == both.index.num_documents == 0


@settings(max_examples=300)
@given(configs(), st.lists(CHANGES, max_size=14), BOUNDS, st.sampled_from([(), (0,), (1,), (0, 2)]))
def test_a_draft_equals_the_naive_twins_whatever_happened_to_the_text(config, changes, bounds, ends) -> None:
    both = Both(*config)
    both.set_prompt([1, 0, 1, 1])
    both.add([1, 0, 1, 1, 0, 1, 0, 0, 1, 2, 1, 0, 1], 256, 0)
    both.add([1, 0, 1, 0, 0, 1, 1, 0, 1, 2, 2, 0], 128, 1)
    for change in changes:
        both.change(*change)
    both.check()
    nodes, depth, chain, siblings = bounds
    for doc in both.docs:
        tree = propose(both.index, doc, *bounds, ends)
        trees.assert_same(tree, both.naive.propose(doc, nodes, depth, is_chain=chain, siblings=siblings, ends=ends))
        assert not set(ends) & set(tree.token_ids.tolist())
        trees.check(tree)
        assert trees.is_ordered(tree)


@given(configs(), st.lists(CHANGES, max_size=8), st.integers(1, 30), st.integers(1, 12))
def test_a_smaller_draft_is_a_prefix_of_a_larger_one(config, changes, max_nodes, max_depth) -> None:
    both = Both(*config)
    both.add([1, 0, 1, 1, 0, 1, 0, 0, 1], 256, 0)
    for change in changes:
        both.change(*change)
    for doc in both.docs:
        small, large = (propose(both.index, doc, size, max_depth, False, True) for size in (max_nodes, 64))
        assert small.token_ids.tolist() == large.token_ids[:max_nodes].tolist()
        assert small.parents.tolist() == large.parents[:max_nodes].tolist()


def test_a_batch_is_its_single_drafts_one_after_the_other() -> None:
    rng = np.random.default_rng(3)
    asks = []
    for _ in range(7):
        both = Both(HistoryConfig(min_match=1, max_match=5), 9)
        both.set_prompt(rng.integers(0, 4, 70).tolist())
        for epoch in (0, 0, 1, 1, 1):
            both.add(rng.integers(0, 4, rng.integers(0, 200)).tolist(), 256, epoch)
        # more than are walked at once, and the last ones twice
        asks += [(both.index, doc) for doc in both.docs]
    count = len(asks)
    indices, docs = [index for index, _ in asks], [doc for _, doc in asks]
    nodes = rng.integers(0, 33, count).astype(np.int32)
    depths = rng.integers(0, 9, count).astype(np.int32)
    chains = rng.random(count) < 0.5
    node_start, *arrays = _core.propose_history(indices, docs, nodes, depths, chains, True)
    assert node_start.dtype == np.int32 and len(node_start) == count + 1 and node_start[-1] > count
    for i, (index, doc) in enumerate(asks):
        part = [array[node_start[i] : node_start[i + 1]] for array in arrays]
        tree = DraftTree(*part, np.zeros(len(part[0]), np.int32))
        trees.assert_same(tree, propose(index, doc, int(nodes[i]), int(depths[i]), bool(chains[i]), True))


def test_removed_answers_draft_no_longer_and_their_memory_comes_back() -> None:
    rng = np.random.default_rng(5)
    both = Both(HistoryConfig(min_match=3, max_match=7))
    for epoch in range(4):
        for _ in range(8):
            both.add(rng.integers(0, 500, 1000).tolist(), 256, epoch)
    full = both.index.nbytes
    assert both.index.retire(3) == 24
    assert both.index.num_tokens == 8000
    both.index.check_integrity()
    assert both.index.nbytes < 0.3 * full
    with pytest.raises(ValueError, match="not in the index"):
        both.index.append(both.docs[0], as_array([1]))
    with pytest.raises(ValueError, match="not in the index"):
        propose(both.index, both.docs[0], 4, 4, False, True)


def test_memory_grows_with_the_tokens_alone() -> None:
    rng = np.random.default_rng(2)
    for config in (HistoryConfig(), HistoryConfig(min_match=1, max_match=64)):
        both = Both(config)
        for _ in range(8):
            both.index.add(rng.integers(0, 150_000, 20_000, dtype=np.int32), 256, 0)
        # all contexts differ: the worst case
        assert both.index.nbytes <= 80 * both.index.num_tokens


@pytest.mark.parametrize("bad", [(0, 4, 4), (3, 2, 4), (1, 2, 0), (1, 65, 4)])
def test_impossible_parameters_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="need 1 <="):
        _core.HistoryIndex(min_match=bad[0], max_match=bad[1], max_matches=bad[2])
