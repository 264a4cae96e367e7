"""Bounds far beyond any draft's, and several threads at once: each with indices of its own, or handed over in turn."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from vllm_specrollout import _core
from vllm_specrollout.types import MOST_NODES

HUGE = 2**31 - 1
PATIENCE_S = 60  # no test waits so long unless it fails


def history() -> Any:
    return _core.HistoryIndex(min_match=1, max_match=7, max_matches=32)


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("is_chain", [True, False])
def test_a_draft_without_bounds_is_a_tree_no_larger_than_what_was_found(tokens: int, is_chain: bool) -> None:
    text = np.random.default_rng(0).integers(0, tokens, 2000).astype(np.int32)
    index = history()
    index.set_prompt(text)
    document = index.open(0)
    index.append(document, text)
    start, ids, parents, log_q = _core.propose_history([index], [document], [HUGE], [HUGE], [is_chain])
    # 32 places for each of three contexts, each followed by the rest of the text at most
    assert start.tolist() == [0, len(ids)] and 0 < len(ids) <= 3 * 32 * 2 * len(text)
    assert np.all(parents < np.arange(len(ids))) and np.all(parents >= -1) and np.all(np.isfinite(log_q))
    assert np.all(ids < tokens)
    # what is asked for in earnest is its beginning
    few = _core.propose_history([index], [document], [MOST_NODES], [HUGE], [is_chain])
    assert few[1].tolist() == ids[:MOST_NODES].tolist() and few[2].tolist() == parents[:MOST_NODES].tolist()
    index.check_integrity()


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [done.result(PATIENCE_S) for done in [pool.submit(task) for task in tasks]]


def work(seed: int) -> list[Any]:
    """What is proposed between appends to an index of its own."""
    found = []
    text = np.random.default_rng(seed).integers(0, 40, 3000).astype(np.int32)
    index = history()
    document = index.open(0)
    for at in range(0, len(text), 10):
        index.append(document, text[at : at + 10])
        found.append([part.tolist() for part in _core.propose_history([index], [document], [16], [8], [False])])
    index.check_integrity()
    return found


def test_threads_with_indices_of_their_own_draft_as_if_alone() -> None:
    alone = [work(seed) for seed in range(4)]
    assert at_once(*(functools.partial(work, seed) for seed in range(4))) == alone and len(alone[0]) == 300


def test_an_index_may_go_from_one_thread_to_another() -> None:
    """As the history's indices do: built on a thread of their own, asked and written by the engine's."""
    text = np.random.default_rng(0).integers(0, 40, 4000).astype(np.int32)
    index, lock, drafts = history(), threading.Lock(), list[list[int]]()
    document = index.open(0)

    def append() -> None:
        for at in range(0, len(text), 20):
            with lock:
                index.append(document, text[at : at + 20])

    def propose() -> None:
        for _ in range(200):
            with lock:
                drafts.append(_core.propose_history([index], [document], [16], [8], [False])[1].tolist())

    at_once(append, propose)
    assert len(drafts) == 200
    index.check_integrity()
    alone = history()
    other = alone.open(0)
    alone.append(other, text)
    both = [_core.propose_history([one], [doc], [16], [8], [False]) for one, doc in ((index, document), (alone, other))]
    assert [part.tolist() for part in both[0]] == [part.tolist() for part in both[1]]
