"""The `ngram` drafter: what followed the request's last tokens earlier in its own prompt and output.

May enter: the carriers, numpy, our C++ module. May not: torch, vLLM, clocks, randomness.
"""

from __future__ import annotations

import numpy as np

from vllm_specrollout._core import HistoryIndex, propose_history
from vllm_specrollout.config.drafters import MAX_MATCHES, NgramConfig
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import MOST_NODES, DraftLimits, RequestBatch, RequestView, TreeBatch

MOST_TOKENS = (2 << 30) // 80
"""Of all running requests' indices together, 2 GiB: a token takes at most 80 bytes, as measured with random ones. Who
comes when they are there is not drafted for, until others have ended."""
_TEXT = 0  # the only document of an index


class NgramDrafter(BaseDrafter):
    """Keeps one index per request and asks all of them in one call per step.

    What an index answers is specified in `tests/reference/history.py`: a request's text is its only document.

    Args:
        config: which contexts are looked up.
        max_nodes: most nodes of a tree, whatever the limits say.
        source: this drafter's index in the engine's list.
    """

    name = "ngram"

    def __init__(self, config: NgramConfig, max_nodes: int = MOST_NODES, source: int = 0) -> None:
        self._config = config
        self._max_nodes = max_nodes
        self._source = source
        self._indices: dict[str, HistoryIndex] = {}
        # requests for which there was no room when they came
        self._left_out: set[str] = set()

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        wanted = np.minimum(limits.wanted(self._source), self._max_nodes)
        # an index that is not asked catches up when it is
        indices = [
            self._synced(view) if count > 0 else None for view, count in zip(batch.views, wanted.tolist(), strict=True)
        ]
        wanted = np.where([index is not None for index in indices], wanted, 0).astype(np.int32)
        columns = propose_history(
            indices,
            [_TEXT] * batch.size,
            wanted,
            limits.max_depth,
            limits.is_chain,
            end_start=batch.end_start,
            end_ids=batch.end_ids,
        )
        return proposed(batch.request_ids, *columns, self._source)

    def forget(self, request_id: str) -> None:
        self._left_out.discard(request_id)
        if self._indices.pop(request_id, None) is not None:
            # there is room again
            self._left_out.clear()

    def _synced(self, view: RequestView) -> HistoryIndex | None:
        """The request's index, with all its tokens; None: there is no room for one more."""
        index = self._indices.get(view.request_id)
        if index is None:
            c = self._config
            if view.request_id in self._left_out:
                return None
            if sum(index.num_tokens for index in self._indices.values()) + len(view.token_ids) > MOST_TOKENS:
                self._left_out.add(view.request_id)
                return None
            index = HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=MAX_MATCHES)
            index.open(0)
            self._indices[view.request_id] = index
        # a request whose tokens shrank or changed (a resumed session) is indexed anew
        index.sync(_TEXT, view.token_ids)
        return index
