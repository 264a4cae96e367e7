"""The `history` and the `ngram` drafter of a runner that looks drafts up on the device: all of them but the lookup.

What belongs here: which texts a request's lookup reads, and what its drafts were when they last came home. How it reads
them is in `kernels/lookup`, and what is kept, and for how long, in `history/`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.drafters.keeping import KeepsHistory, Live
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.texts import Texts
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.trees.batch import cut, over
from vllm_specrollout.types import Answer, DraftLimits, RequestBatch, RequestView, TreeBatch, empty_trees


class LateDrafts(BaseDrafter):
    """Proposes what the device drafted last, so that a budget can choose how much of the like is verified."""

    def __init__(self) -> None:
        self.latest: Callable[[], TreeBatch] = lambda: empty_trees([])
        """The drafts that came home last, whoever made them. One drafter of an engine is given them."""

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        return cut(over(self.latest(), batch.request_ids), np.minimum(limits.max_nodes, limits.max_depth))


class LookedUpNgram(LateDrafts):
    """There is nothing to it: a request's own tokens are where the device has them."""

    name = "ngram"
    is_lookup = True


class LookedUpHistory(KeepsHistory, LateDrafts):
    """Knows which row of the device's spans and which running requests draft for a request.

    Who looks up counts it in `lookups` and `hits`.

    Args:
        make_texts: over a store.
        store, vocabulary: as `KeepsHistory`.
    """

    def __init__(
        self,
        config: HistoryConfig,
        make_texts: Callable[[HistoryStore], Texts],
        *,
        store: HistoryStore | None = None,
        vocabulary: Vocabulary = ANY_VOCABULARY,
    ) -> None:
        LateDrafts.__init__(self)
        KeepsHistory.__init__(self, config, store, vocabulary)
        self.library = self.texts = make_texts(self.store)
        # running requests of each problem and epoch, in the order they came
        self._groups: dict[tuple[str, int], dict[str, None]] = {}
        self._changed: set[str] = set()

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch:
        for view in batch.views:
            self._live_of(view)
        return LateDrafts.propose(self, batch, limits)

    def row_of(self, request_id: str) -> int:
        """Row of the spans of its problem's earlier answers; -1: there is none, or the request is not known."""
        live = self._live.get(request_id)
        return -1 if live is None else self.texts.row(live.problem_id)

    def siblings_of(self, request_id: str) -> list[str]:
        """Other running requests whose answers draft for it: of its problem and epoch, in the order they came."""
        live = self._live.get(request_id)
        if live is None or not self._config.siblings:
            return []
        return [other for other in self._groups[live.problem_id, live.epoch] if other != request_id]

    def take_changed(self) -> set[str]:
        """Running requests whose row or siblings are others than when this was called last."""
        changed, self._changed = self._changed, set()
        return changed

    def admit(self, view: RequestView) -> None:
        super().admit(view)
        live = self._live[view.request_id]
        group = self._groups.setdefault((live.problem_id, live.epoch), {})
        group[view.request_id] = None
        self._changed.update(group)

    def _leaves(self, request_id: str) -> Live | None:
        live = super()._leaves(request_id)
        if live is not None:
            group = self._groups[live.problem_id, live.epoch]
            del group[request_id]
            self._changed.update(group)
            if not group:
                del self._groups[live.problem_id, live.epoch]
        return live

    def _keep(self, live: Live, answer: Answer) -> None:
        self.texts.add(answer)
