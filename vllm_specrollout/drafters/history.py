"""The `history` drafter: what followed the last tokens in earlier answers to the same problem.

What belongs here: which index a request asks, and what of a request is written into it. How the index answers is in
`tests/reference/history.py` (the specification) and `csrc/core/history_index.h`; what is kept, and for how long, in
`history/`.

Source: RhymeRL, sections 5.1-5.3; DAS (one index per problem, refreshed as answers grow).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_specrollout._core import HistoryIndex, propose_history, sync_history
from vllm_specrollout.config.drafters import MAX_MATCHES, HistoryConfig
from vllm_specrollout.drafters.keeping import KeepsHistory, Live
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import MOST_NODES, Answer, DraftLimits, RequestBatch, RequestView, TreeBatch

_CHECKED_EVERY = 16
"""Steps after which the cache is asked for all running requests' indices, and sees how they have grown.

Asking in each step, `propose` took 0.21, 0.64 and 2.79 ms at batch 16, 64 and 256; now it takes 0.16, 0.33 and 1.84.
Meanwhile indices may exceed `max_mib` by what so many steps add to them.
"""


class HistoryDrafter(KeepsHistory):
    """Asks the indices of all running requests' problems in one call per step.

    Args:
        config: which contexts are looked up, and who may draft.
        max_nodes: most nodes of a tree, whatever a decision says.
        source: this drafter's index in the engine's list.
        cache: its indices; by default, what `config` says.
        store, vocabulary: as `KeepsHistory`.
    """

    def __init__(
        self,
        config: HistoryConfig,
        max_nodes: int = MOST_NODES,
        source: int = 0,
        *,
        store: HistoryStore | None = None,
        cache: IndexCache[Any] | None = None,
        vocabulary: Vocabulary = ANY_VOCABULARY,
    ) -> None:
        super().__init__(config, store, vocabulary)
        self._max_nodes = max_nodes
        self._source = source
        self.library = self.cache = cache if cache is not None else IndexCache(config, self.store, self._make_index)
        # of the cache when it was asked last, and the steps until it is asked again, if nothing changes before
        self._version, self._steps_left = 0, 0

    def _make_index(self) -> Any:
        c = self._config
        return HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=MAX_MATCHES)

    # --- drafting ----------------------------------------------------------------------------------------------------

    def admit(self, view: RequestView) -> None:
        super().admit(view)
        self._steps_left = 0

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        if self._version != self.cache.version:
            self._version, self._steps_left = self.cache.version, 0
        lives = [self._indexed(view) for view in batch.views]
        self._steps_left = self._steps_left - 1 if self._steps_left else _CHECKED_EVERY - 1
        # written down even if it drafts nothing itself: its siblings may
        written = [(view, live) for view, live in zip(batch.views, lives, strict=True) if live.index is not None]
        sync_history(
            [live.index for _, live in written],
            [live.document for _, live in written],
            [view.token_ids for view, _ in written],
            [view.num_prompt_tokens for view, _ in written],
        )
        has_index = np.fromiter((live.index is not None for live in lives), np.bool_, len(lives))
        wanted = np.where(has_index, np.minimum(limits.wanted(self._source), self._max_nodes), 0).astype(np.int32)
        columns = propose_history(
            [live.index for live in lives],
            [live.document for live in lives],
            wanted,
            limits.max_depth,
            limits.is_chain,
            self._config.siblings,
            batch.end_start,
            batch.end_ids,
        )
        self.lookups += int(np.count_nonzero(wanted))
        self.hits += int(np.count_nonzero(np.diff(columns[0])))
        return proposed(batch.request_ids, *columns, self._source)

    def _indexed(self, view: RequestView) -> Live:
        """The request, with its problem's index if there is one: it is being built at first."""
        # preempted since and back, if it is not known
        live = self._live.get(view.request_id) or self._live_of(view)
        if self._steps_left:
            # between two checks, an index that is there is the right one, and one that is not is not built yet
            return live
        index = self.cache.get(live.problem_id)
        if index is None:
            # not held either: what was dropped for memory is to be gone
            live.index = None
        elif live.index is not index:
            # first sight, a new epoch, or an index that was dropped for memory and built anew
            index.set_prompt(view.token_ids[: view.num_prompt_tokens])
            live.index, live.document = index, index.open(live.epoch)
        return live

    def _keep(self, live: Live, answer: Answer) -> None:
        """Leave the whole answer to its siblings, without what was sampled beyond its end."""
        index = self.cache.get(live.problem_id)
        if index is not None and index is live.index:
            index.sync(live.document, answer.token_ids)
            self.cache.track(live.problem_id, answer.request_id, live.document, answer.epoch, answer.reward)

    def begin_epoch(self, epoch: int | None = None) -> int:
        self._steps_left = 0
        return super().begin_epoch(epoch)
