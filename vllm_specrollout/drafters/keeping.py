"""What drafters that learn from answers have in common: they keep them, tell epochs, and take rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.drafters.base import BaseDrafter
from vllm_specrollout.history.answers import MOST_TAIL, RewardOutcome, short_name
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.courier import Courier
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Vocabulary
from vllm_specrollout.types import Answer, RequestView


class Library(Protocol):
    """Where drafts are looked up, built from the store for the problems that are asked now."""

    def want(self, problem_id: str) -> None: ...

    def done(self, problem_id: str) -> None: ...

    def set_reward(self, request_id: str, reward: float) -> None: ...

    # a dataclass of plain values
    def stats(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Live:
    """A running request, and where its answer is written while it runs, if it is written anywhere."""

    problem_id: str
    # of its admission: what it generates is history of that epoch, whenever it ends
    epoch: int
    index: Any = None
    document: int = -1


class KeepsHistory(BaseDrafter):
    """Tells a store and a library of requests, answers, epochs and rewards. Who inherits names the library, and drafts.

    Args:
        store: what is kept; by default, what `config` says.
        vocabulary: the model's; answers in another one draft nothing.
    """

    name = "history"
    is_lookup = True
    library: Library

    def __init__(
        self, config: HistoryConfig, store: HistoryStore | None = None, vocabulary: Vocabulary = ANY_VOCABULARY
    ) -> None:
        self._config = config
        # what waits for a disk must not hold the engine up
        background = Background("specrollout-history-store").submit
        self.store = store if store is not None else HistoryStore(config, background, vocabulary)
        self.courier = Courier(config, vocabulary) if config.url else None
        self._live: dict[str, Live] = {}
        self.hits, self.lookups = 0, 0

    def admit(self, view: RequestView) -> None:
        """Note the arrival, and have its problem's answers at hand when drafts are wanted."""
        name = view.name or view.request_id
        epoch = self.store.arrived(view.problem_id, name, view.weights_version, view.continues)
        self.library.want(view.problem_id)
        self._live[view.request_id] = Live(view.problem_id, epoch)

    def _live_of(self, view: RequestView) -> Live:
        if view.request_id not in self._live:
            # preempted since, and back
            self.admit(view)
        return self._live[view.request_id]

    def _leaves(self, request_id: str) -> Live | None:
        return self._live.pop(request_id, None)

    # --- learning ----------------------------------------------------------------------------------------------------

    def finish(self, ending: Answer) -> None:
        if not len(ending.token_ids):
            # no answer to keep, but its problem is to know that it runs no longer
            self.store.ended(ending.name or ending.request_id)
            self.forget(ending.request_id)
            return
        live = self._leaves(ending.request_id)
        answer = Answer(
            ending.name or ending.request_id,
            ending.problem_id,
            ending.prompt_ids[-MOST_TAIL:],
            ending.token_ids,
            ending.status,
            ending.weights_version,
            epoch=self.store.epoch if live is None else live.epoch,
        )
        # with its reward, if that came before the end
        answer = self.store.append(answer)
        if live is not None:
            self._keep(live, answer)
            self.library.done(live.problem_id)

    def _keep(self, live: Live, answer: Answer) -> None:
        """Leave a request's whole answer to its siblings."""
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        live = self._leaves(request_id)
        if live is None:
            return
        if live.index is not None:
            # preempted: it comes back from its prompt, and must not find itself as a sibling
            live.index.remove(live.document)
        self.library.done(live.problem_id)

    # --- what trainers tell ------------------------------------------------------------------------------------------

    def report_reward(self, names: Sequence[str], reward: float) -> RewardOutcome:
        """Keep a request's reward.

        Args:
            names: what its client may call it, likeliest first.
            reward: finite.
        """
        for name in names:
            outcome = self.store.report_reward(name, reward)
            if outcome is not RewardOutcome.UNKNOWN:
                self.library.set_reward(short_name(name), reward)
                return outcome
        return RewardOutcome.UNKNOWN

    def begin_epoch(self, epoch: int | None = None) -> int:
        """All problems will be asked again; returns the epoch begun.

        Raises:
            EpochError: it lies before the present one, or too far behind it.
        """
        return self.store.begin_epoch(epoch)

    def as_dict(self) -> dict[str, Any]:
        """Counts, bytes and hit rate, in plain JSON types."""
        return {
            "store": dataclasses.asdict(self.store.stats()),
            "library": dataclasses.asdict(self.library.stats()),
            "courier": None if self.courier is None else self.courier.as_dict(),
            "lookups": self.lookups,
            "hits": self.hits,
            "hit_rate": self.hits / self.lookups if self.lookups else 0.0,
        }

    def close(self) -> None:
        """Write what is left to write, unless the disk stands still; nothing drafts afterwards."""
        self.library.close()
        self.store.close()
        if self.courier is not None:
            self.courier.close()
