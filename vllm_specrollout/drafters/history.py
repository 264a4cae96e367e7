"""The `history` drafter: what followed the last tokens in earlier answers to the same problem.

What belongs here: which index a request asks, and what of a request is written into it. How the index answers is in
`history_naive.py` (the specification) and `csrc/core/history_index.h`; what is kept, and for how long, in `history/`.

Source: RhymeRL, sections 5.1-5.3; DAS (one index per problem, refreshed as answers grow).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_specrollout.config import MAX_NODES
from vllm_specrollout.drafter_config import HistoryConfig
from vllm_specrollout.drafters.ngram import load_core
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.background import one_thread
from vllm_specrollout.history.library import Library
from vllm_specrollout.history.stats import Outcome
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.types import (
    EMPTY_TREE,
    Decision,
    DraftTree,
    Ending,
    Feedback,
    RequestView,
    Shape,
)

_TAIL = 64  # tokens of the prompt that contexts of an answer's beginning may reach into: the longest context there is


@dataclass(slots=True)
class _Live:
    """A running request, and where its answer is written."""

    problem_id: str
    # of its admission: what it generates is history of that epoch, whenever it ends
    epoch: int
    index: Any = None
    document: int = -1


class HistoryDrafter:
    """Asks the indices of all running requests' problems in one call per step.

    Args:
        config: which contexts are looked up, and who may draft.
        max_nodes: most nodes of a tree, whatever a decision says.
        source: this drafter's index in the engine's list.
        store, library: what is kept; by default, what `config` says.
        vocabulary: the model's; answers in another one draft nothing.
    """

    name = "history"

    def __init__(
        self,
        config: HistoryConfig,
        max_nodes: int = MAX_NODES,
        source: int = 0,
        *,
        store: HistoryStore | None = None,
        library: Library[Any] | None = None,
        vocabulary: Vocabulary = ANY_VOCABULARY,
    ) -> None:
        self._core = load_core(self.name)
        self._config = config
        self._max_nodes = max_nodes
        self._source = np.full(max_nodes, source, dtype=np.int32)
        self._source.flags.writeable = False
        self.store = store if store is not None else HistoryStore(config, one_thread(), vocabulary)
        self.library = library if library is not None else Library(config, self.store, self._make_index)
        self._live: dict[str, _Live] = {}
        self.hits, self.lookups = 0, 0

    def _make_index(self) -> Any:
        c = self._config
        return self._core.HistoryIndex(min_match=c.min_match, max_match=c.max_match, max_matches=c.max_matches)

    # --- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, views: Sequence[RequestView], decisions: Sequence[Decision]) -> list[DraftTree]:
        trees = [EMPTY_TREE] * len(views)
        asked, indices, documents, max_nodes, max_depth, is_chain = [], [], [], [], [], []
        for i, (view, decision) in enumerate(zip(views, decisions, strict=True)):
            # written down even if it drafts nothing itself: its siblings may
            live = self._written(view)
            depth = min(decision.max_depth, view.max_new_tokens - 1)
            if live is None or depth <= 0 or decision.max_nodes <= 0 or Shape.OFF in (decision.shape, view.shape):
                continue
            asked.append(i)
            indices.append(live.index)
            documents.append(live.document)
            max_nodes.append(min(decision.max_nodes, self._max_nodes))
            max_depth.append(depth)
            is_chain.append(Shape.CHAIN in (decision.shape, view.shape))
        if not asked:
            return trees
        node_start, token_ids, parents, log_q = self._core.propose_history(
            indices, documents, max_nodes, max_depth, is_chain, self._config.siblings
        )
        self.lookups += len(asked)
        ends = node_start.tolist()
        for i, start, end in zip(asked, ends, ends[1:], strict=False):
            if end > start:
                self.hits += 1
                part = slice(start, end)
                trees[i] = DraftTree(token_ids[part], parents[part], log_q[part], self._source[: end - start])
        return trees

    def _written(self, view: RequestView) -> _Live | None:
        """The request with its answer so far in its problem's index; None while that is being built."""
        live = self._live.get(view.request_id) or self._admit(view)
        index = self.library.get(live.problem_id)
        if index is None:
            # not held either: what was dropped for memory is to be gone
            live.index = None
            return None
        if live.index is not index:
            # first sight, a new epoch, or an index that was dropped for memory and built anew
            index.set_prompt(view.token_ids[: view.num_prompt_tokens])
            live.index, live.document = index, index.open(live.epoch)
        index.sync(live.document, view.token_ids[view.num_prompt_tokens :])
        return live

    def _admit(self, view: RequestView) -> _Live:
        epoch = self.store.arrived(view.problem_id, view.name or view.request_id, view.weights_version)
        self.library.want(view.problem_id)
        live = self._live[view.request_id] = _Live(view.problem_id, epoch)
        return live

    # --- learning ----------------------------------------------------------------------------------------------------

    def observe(self, feedback: Sequence[Feedback]) -> None:
        """Nothing to learn: the tokens themselves are the memory."""

    def finish(self, ending: Ending) -> None:
        live = self._live.pop(ending.request_id, None)
        answer = Answer(
            ending.problem_id,
            ending.name or ending.request_id,
            self.store.epoch if live is None else live.epoch,
            ending.weights_version,
            ending.status,
            ending.token_ids,
            ending.prompt_ids[-_TAIL:],
        )
        # with its reward, if that came before the end
        answer = self.store.append(answer)
        if live is not None:
            self._keep(live, answer)
            self.library.done(live.problem_id)

    def _keep(self, live: _Live, answer: Answer) -> None:
        """Leave the whole answer to its siblings, without what was sampled beyond its end."""
        index = self.library.get(live.problem_id)
        if index is not None and index is live.index:
            index.sync(live.document, answer.token_ids)
            self.library.track(live.problem_id, answer.request_id, live.document, live.epoch, answer.reward)

    def forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        if live.index is not None:
            # preempted: it comes back from its prompt, and must not find itself as a sibling
            live.index.remove(live.document)
        self.library.done(live.problem_id)

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
                self.library.set_reward(name, reward)
                return outcome
        return Outcome.UNKNOWN

    def begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch begun.

        Raises:
            ConfigError: `epoch` is below 0.
        """
        return self.store.begin_epoch(epoch)

    def as_dict(self) -> dict[str, Any]:
        """Counts, bytes and hit rate, in plain JSON types."""
        return {
            "store": dataclasses.asdict(self.store.stats()),
            "library": dataclasses.asdict(self.library.stats()),
            "lookups": self.lookups,
            "hits": self.hits,
            "hit_rate": self.hits / self.lookups if self.lookups else 0.0,
        }

    def close(self) -> None:
        """Write what is left to write; nothing drafts afterwards."""
        self.library.close()
        self.store.close()
