"""The `ngram` drafter: what followed the request's last tokens earlier in its own prompt and output.

May enter: the carriers, numpy, our C++ module. May not: torch, vLLM, clocks, randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.drafter_config import NgramConfig
from vllm_specrollout.errors import UnsupportedError
from vllm_specrollout.types import EMPTY_TREE, Decision, DraftTree, Ending, Feedback, RequestView, Shape


class NgramDrafter:
    """Keeps one index per request (`ngram_naive` says what it answers) and asks all of them in one call per step.

    Args:
        config: which contexts are looked up.
        max_nodes: most nodes of a tree, whatever a decision says.
        source: this drafter's index in the engine's list.
    """

    name = "ngram"

    def __init__(self, config: NgramConfig, max_nodes: int = MAX_NODES, source: int = 0) -> None:
        self._core = load_core(self.name)
        self._config = config
        self._max_nodes = max_nodes
        # a tree's `source` is a piece of this: one allocation serves all trees
        self._source = np.full(max_nodes, source, dtype=np.int32)
        self._source.flags.writeable = False
        self._indices: dict[str, Any] = {}

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        trees = [EMPTY_TREE] * len(views)
        asked, indices, max_nodes, max_depth, is_chain = [], [], [], [], []
        for i, (view, decision) in enumerate(zip(views, decisions, strict=True)):
            # a draft of d tokens yields up to d + 1: the bonus token needs room too
            depth = min(decision.max_depth, view.max_new_tokens - 1)
            if depth <= 0 or decision.max_nodes <= 0 or Shape.OFF in (decision.shape, view.shape):
                # its index catches up when it is asked again
                continue
            asked.append(i)
            indices.append(self._synced_index(view))
            max_nodes.append(min(decision.max_nodes, self._max_nodes))
            max_depth.append(depth)
            is_chain.append(Shape.CHAIN in (decision.shape, view.shape))
        if not asked:
            return trees
        bounds = (np.asarray(max_nodes, np.int32), np.asarray(max_depth, np.int32), np.asarray(is_chain, np.bool_))
        token_ids, parents, log_q, offsets = self._core.propose_batch(indices, *bounds)
        ends = offsets.tolist()
        for i, start, end in zip(asked, ends, ends[1:], strict=False):
            if start < end:
                part = slice(start, end)
                trees[i] = DraftTree(token_ids[part], parents[part], log_q[part], self._source[: end - start])
        return trees

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Nothing to learn: the tokens themselves are the memory."""

    def finish(self, ending: Ending) -> None:
        """Nothing outlives a request."""

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def _synced_index(self, view: RequestView) -> Any:
        index = self._indices.get(view.request_id)
        if index is None:
            c = self._config
            index = self._core.NgramIndex(min_match=c.min_match, max_match=c.max_match, max_matches=c.max_matches)
            self._indices[view.request_id] = index
        # a request whose tokens shrank or changed (a resumed session) is indexed anew
        index.sync(view.token_ids)
        return index


def load_core(drafter: str) -> ModuleType:
    """Our C++ module.

    Raises:
        UnsupportedError: it is not built.
    """
    try:
        from vllm_specrollout import _core
    except ImportError as error:
        raise UnsupportedError(
            f"the `{drafter}` drafter needs the C++ module `vllm_specrollout._core`, which cannot be loaded: {error}",
            "install a wheel, or build it from a checkout: pip install --no-build-isolation -e .",
        ) from error
    return _core
