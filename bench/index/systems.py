"""The two indices behind one face: a problem's past goes in, its present grows, and all running answers ask at once.

Times are CPU time of the calling thread, since both work in that thread alone: what else the host does is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time
from typing import Any

import numpy as np
from vllm_specrollout.kernels.lookup import naive

from vllm_specrollout import _core
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.history.index_cache import ONE, weight_of

from .data import Data, IntArray, Key

Drafts = tuple[list[tuple[Sequence[int], Sequence[int], Sequence[float]]], list[float]]
"""Per request (token ids, parents, probabilities), and seconds per request."""

ARCTIC = "0.3.0"
_DEPTH = 64
_TREE_CONTEXT = 64


class Ours:
    """The history index, one per problem."""

    def __init__(self, data: Data, config: HistoryConfig) -> None:
        self._data, self._answers, self._config = data, data.answers, config
        self._indices: list[Any] = []
        self._docs: dict[Key, int] = {}

    def build(self) -> float:
        """Take the past in, and begin the answers of the present; returns the seconds of the former."""
        begin = thread_time()
        c = self._config
        for problem in self._data.problems:
            index = _core.HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=MAX_MATCHES)
            index.set_prompt(problem.prompt)
            for number, epoch in enumerate(problem.past):
                for answer, reward in zip(epoch.answers, epoch.rewards, strict=True):
                    index.add(answer, weight_of(c, len(problem.past) - number, reward), number)
            self._indices.append(index)
        seconds = thread_time() - begin
        for p, a in self._answers:
            self._docs[p, a] = self._indices[p].open(len(self._data.problems[p].past))
        return seconds

    def append(self, key: Key, start: int, end: int) -> float:
        """The next tokens of a present answer; returns seconds."""
        index, doc, tokens = self._indices[key[0]], self._docs[key], self._answers[key][start:end]
        begin = thread_time()
        index.append(doc, tokens)
        return thread_time() - begin

    def draft(self, asks: Sequence[tuple[Key, int]], nodes: int, is_chain: bool) -> Drafts:
        """Drafts of (answer, tokens it has)."""
        begin = thread_time()
        count = len(asks)
        node_start, token_ids, parents, log_q = _core.propose_history(
            [self._indices[key[0]] for key, _ in asks],
            [self._docs[key] for key, _ in asks],
            [nodes] * count,
            [nodes] * count,
            [is_chain] * count,
        )
        seconds = (thread_time() - begin) / count
        ends = node_start.tolist()
        columns = (token_ids.tolist(), parents.tolist(), np.exp(log_q.astype(np.float64)).tolist())
        drafts = [tuple(column[a:b] for column in columns) for a, b in zip(ends, ends[1:], strict=False)]
        return drafts, [seconds] * count  # type: ignore[return-value]

    def nbytes(self) -> int:
        """Memory of everything held."""
        return sum(index.nbytes for index in self._indices)


class Theirs:
    """arctic-inference's suffix cache: one per problem, so that it too drafts from the problem's answers alone.

    Args:
        is_bounded: as vLLM uses it by default (drafts no longer than the context matched, no token less probable than
            0.1); else as many nodes as asked for.
    """

    def __init__(self, data: Data, is_bounded: bool) -> None:
        self._cache_type = load_arctic()
        self._data, self._answers = data, data.answers
        self._bounds = (1.0, 0.1) if is_bounded else (1e6, 0.0)
        self._caches: list[Any] = []
        self._texts: dict[Key, IntArray] = {}

    def build(self) -> float:
        begin = thread_time()
        for problem in self._data.problems:
            cache = self._cache_type(_DEPTH)
            for number, epoch in enumerate(problem.past):
                for i, answer in enumerate(epoch.answers):
                    cache.start_request((number, i), problem.prompt)
                    cache.add_active_response((number, i), answer)
                    cache.stop_request((number, i))
            self._caches.append(cache)
        seconds = thread_time() - begin
        for (p, a), answer in self._answers.items():
            prompt = self._data.problems[p].prompt
            self._caches[p].start_request(a, prompt)
            self._texts[p, a] = np.concatenate([prompt, answer])
        return seconds

    def append(self, key: Key, start: int, end: int) -> float:
        cache, tokens = self._caches[key[0]], self._answers[key][start:end]
        begin = thread_time()
        cache.add_active_response(key[1], tokens)
        return thread_time() - begin

    def draft(self, asks: Sequence[tuple[Key, int]], nodes: int, is_chain: bool) -> Drafts:
        drafts, seconds = [], []
        for key, length in asks:
            end = len(self._data.problems[key[0]].prompt) + length
            context = self._texts[key][max(0, end - _TREE_CONTEXT) : end]
            begin = thread_time()
            draft = self._caches[key[0]].speculate(
                key[1],
                context,
                max_spec_tokens=nodes,
                max_spec_factor=self._bounds[0],
                min_token_prob=self._bounds[1],
                use_tree_spec=not is_chain,
            )
            seconds.append(thread_time() - begin)
            drafts.append((draft.token_ids, draft.parents, draft.probs))
        return drafts, seconds

    def nbytes(self) -> int:
        trees = [tree for cache in self._caches for tree in (cache._global_tree, *cache._local_trees.values())]
        return sum(tree.estimate_memory() for tree in trees)


class LookedUp:
    """What the device looks up in the same texts, by the plain way (kernels/lookup/naive.py)."""

    def __init__(self, data: Data, config: HistoryConfig) -> None:
        self._data, self._answers, self._config = data, data.answers, config
        self._past: list[list[naive.Text]] = []
        self._lengths = dict.fromkeys(self._answers, 0)

    def build(self) -> float:
        for problem in self._data.problems:
            tail, newest = problem.prompt[-naive.REACH :], len(problem.past)
            self._past.append(
                [
                    naive.Text(
                        np.concatenate([tail, answer]),
                        weight=np.float32(weight_of(self._config, newest - number, reward) / ONE),
                    )
                    for number, epoch in enumerate(problem.past)
                    for answer, reward in zip(epoch.answers, epoch.rewards, strict=True)
                ]
            )
        return 0.0

    def append(self, key: Key, start: int, end: int) -> float:
        self._lengths[key] = end
        return 0.0

    def draft(self, asks: Sequence[tuple[Key, int]], nodes: int, is_chain: bool) -> Drafts:
        drafts = []
        for (p, own), _ in asks:
            prompt, present = self._data.problems[p].prompt, self._data.problems[p].present
            running = [
                naive.Text(np.concatenate([prompt, answer[: self._lengths[p, a]]]), first=len(prompt) - 1)
                for a, answer in enumerate(present.answers)
            ]
            itself = naive.Text(running.pop(own).tokens)
            texts = [*self._past[p], *running, itself]
            tokens, parents, chances = naive.look_up(
                texts, itself.tokens, (), nodes, nodes, is_chain=is_chain, max_depth=nodes
            )
            count = int((tokens >= 0).sum())
            # of paths; of a token, given those before it, is what the index says
            given = chances[:count] / np.append(chances, np.float32(1.0))[parents[:count]]
            drafts.append((tokens[:count].tolist(), parents[:count].tolist(), given.tolist()))
        return drafts, [0.0] * len(asks)


System = Ours | Theirs | LookedUp


def load_arctic() -> Any:
    """The other system.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        raise UnsupportedError(
            f"`specrollout bench index` compares with arctic-inference {ARCTIC}, which cannot be imported: {error}",
            f"run `pip install arctic-inference=={ARCTIC}`",
        ) from None
    return SuffixDecodingCache
