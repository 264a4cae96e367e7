"""The `history` drafter: what followed the last tokens in earlier answers to the same problem.

What belongs here: which index a request asks, and what of a request is written into it. How the index answers is in
`tests/reference/history.py` (the specification) and `csrc/core/history_index.h`; what is kept, and for how long, in
`history/`.

Source: RhymeRL, sections 5.1-5.3; DAS (one index per problem, refreshed as answers grow).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specrollout._core import HistoryIndex, propose_history, sync_history
from vllm_specrollout.cluster.courier import Courier
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.history.answers import MOST_TAIL, Answer, Outcome, short_name
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.index_cache import IndexCache
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.trees.batch import proposed
from vllm_specrollout.types import MOST_NODES, DraftLimits, FinishedRequest, RequestBatch, RequestView, TreeBatch

_CHECKED_EVERY = 16
"""Steps after which the cache is asked for all running requests' indices, and sees how they have grown.

Asking in each step, `propose` took 0.21, 0.64 and 2.79 ms at batch 16, 64 and 256; now it takes 0.16, 0.33 and 1.84.
Meanwhile indices may exceed `max_mib` by what so many steps add to them.
"""


@dataclass(slots=True)
class _Live:
    """A running request, and where its answer is written."""

    problem_id: str
    # of its admission: what it generates is history of that epoch, whenever it ends
    epoch: int
    index: Any = None
    document: int = -1


class HistoryDrafter(BaseDrafter):
    """Asks the indices of all running requests' problems in one call per step.

    Args:
        config: which contexts are looked up, and who may draft.
        max_nodes: most nodes of a tree, whatever a decision says.
        source: this drafter's index in the engine's list.
        store, cache: what is kept; by default, what `config` says.
        vocabulary: the model's; answers in another one draft nothing.
    """

    name = "history"
    is_lookup = True

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
        self._config = config
        self._max_nodes = max_nodes
        self._source = source
        # what waits for a disk must not hold the engine up
        background = Background("specrollout-history-store").submit
        self.store = store if store is not None else HistoryStore(config, background, vocabulary)
        self.cache = cache if cache is not None else IndexCache(config, self.store, self._make_index)
        self.courier = Courier(config, vocabulary) if config.url else None
        self._live: dict[str, _Live] = {}
        self.hits, self.lookups = 0, 0
        # of the cache when it was asked last, and the steps until it is asked again, if nothing changes before
        self._version, self._steps_left = 0, 0

    def _make_index(self) -> Any:
        c = self._config
        return HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=c.max_matches)

    # --- drafting ----------------------------------------------------------------------------------------------------

    def admit(self, view: RequestView) -> None:
        """Note the arrival, and have its problem's index ready when drafts are wanted."""
        name = view.name or view.request_id
        epoch = self.store.arrived(view.problem_id, name, view.weights_version, view.continues)
        self.cache.want(view.problem_id)
        self._live[view.request_id] = _Live(view.problem_id, epoch)
        self._steps_left = 0

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        if self._version != self.cache.version:
            self._version, self._steps_left = self.cache.version, 0
        lives = [self._live_of(view) for view in batch.views]
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

    def _live_of(self, view: RequestView) -> _Live:
        """The request, with its problem's index if there is one: it is being built at first."""
        live = self._live.get(view.request_id)
        if live is None:
            # preempted since, and back
            self.admit(view)
            live = self._live[view.request_id]
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

    # --- learning ----------------------------------------------------------------------------------------------------

    def finish(self, ending: FinishedRequest) -> None:
        if not len(ending.token_ids):
            # no answer to keep, but its problem is to know that it runs no longer
            self.store.ended(ending.name or ending.request_id)
            self.forget(ending.request_id)
            return
        live = self._live.pop(ending.request_id, None)
        answer = Answer(
            ending.problem_id,
            ending.name or ending.request_id,
            self.store.epoch if live is None else live.epoch,
            ending.weights_version,
            ending.status,
            ending.token_ids,
            ending.prompt_ids[-MOST_TAIL:],
        )
        # with its reward, if that came before the end
        answer = self.store.append(answer)
        if live is not None:
            self._keep(live, answer)
            self.cache.done(live.problem_id)

    def _keep(self, live: _Live, answer: Answer) -> None:
        """Leave the whole answer to its siblings, without what was sampled beyond its end."""
        index = self.cache.get(live.problem_id)
        if index is not None and index is live.index:
            index.sync(live.document, answer.token_ids)
            self.cache.track(live.problem_id, answer.request_id, live.document, answer.epoch, answer.reward)

    def forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        if live.index is not None:
            # preempted: it comes back from its prompt, and must not find itself as a sibling
            live.index.remove(live.document)
        self.cache.done(live.problem_id)

    # --- what trainers tell ------------------------------------------------------------------------------------------

    def report_reward(self, names: Sequence[str], reward: float) -> Outcome:
        """Keep a request's reward.

        Args:
            names: what its client may call it, likeliest first.
            reward: finite.
        """
        for name in names:
            outcome = self.store.report_reward(name, reward)
            if outcome is not Outcome.UNKNOWN:
                self.cache.set_reward(short_name(name), reward)
                return outcome
        return Outcome.UNKNOWN

    def begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch begun.

        Raises:
            EpochError: it lies before the present one, or too far behind it.
        """
        self._steps_left = 0
        return self.store.begin_epoch(epoch)

    def as_dict(self) -> dict[str, Any]:
        """Counts, bytes and hit rate, in plain JSON types."""
        return {
            "store": dataclasses.asdict(self.store.stats()),
            "library": dataclasses.asdict(self.cache.stats()),
            "courier": None if self.courier is None else self.courier.as_dict(),
            "lookups": self.lookups,
            "hits": self.hits,
            "hit_rate": self.hits / self.lookups if self.lookups else 0.0,
        }

    def close(self) -> None:
        """Write what is left to write, unless the disk stands still; nothing drafts afterwards."""
        self.cache.close()
        self.store.close()
        if self.courier is not None:
            self.courier.close()
