"""Indices of the problems asked for: built from the store in the background, dropped when memory is short.

An index is private to the thread that builds it until it is published. From then on it belongs to the thread that calls
`want`, `get`, `done`, `track` and `set_reward`, the engine's: indices have no locks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import logger
from vllm_specrollout.history.background import Background
from vllm_specrollout.history.database import Located
from vllm_specrollout.history.store import HistoryStore
from vllm_specrollout.types import IntArray

# room made for an answer before it is added: at least this, and more once indices have taken more, in bytes per token
_LEAST_GUESS = 256.0
# indices for each MiB of `max_mib`: small ones of problems that never come back; and bytes that Python adds to each,
# with which this figure and the store's are within a tenth of what the process takes for 1 to 32 answers of a problem
_PER_MIB, _EACH = 128, 1000
ONE = 1 << 8
"""Weight 1.0, as the index takes it: weights are added up a great many times, so they are whole numbers."""
MOST = (1 << 31) - 1


class Index(Protocol):
    """What the cache needs of an index; the drafter needs more."""

    @property
    def nbytes(self) -> int: ...

    def set_prompt(self, token_ids: IntArray) -> None:
        """The prompt of the answers added from now on; cheap for one that the index has."""

    def add(self, token_ids: IntArray, weight: int, epoch: int) -> int:
        """Add a whole answer; returns its document's number."""

    def set_weight(self, document: int, weight: int) -> None: ...

    def remove(self, document: int) -> None: ...


IndexType = TypeVar("IndexType", bound=Index)


@dataclass(slots=True)
class Document:
    """An answer in an index."""

    number: int
    epoch: int
    reward: float | None


@dataclass(slots=True)
class ProblemIndex(Generic[IndexType]):
    """A problem's index, or the place for it."""

    # None: being built
    index: IndexType | None = None
    # requests that run now
    running: int = 0
    # of the index, as last seen, with the room made for its next answer
    num_bytes: int = 0
    # of this engine's and, once built from the store, of all answers: by request; the latest, where ids repeat
    documents: dict[str, Document] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Built(Generic[IndexType]):
    """An index that its builder's thread still has to itself."""

    index: IndexType
    # that it was weighed for
    epoch: int
    documents: dict[str, Document] = field(default_factory=dict)


@dataclass(slots=True)
class IndexCacheStats:
    """What a cache holds, and what it went through."""

    indices: int = 0
    building: int = 0
    num_bytes: int = 0
    """Of the process: what the indices allocated, and what Python adds to each."""
    built: int = 0
    build_seconds: float = 0.0
    dropped: int = 0
    """Indices dropped for memory."""
    shortened: int = 0
    """Indices built without their oldest answers, for memory."""
    given_up: int = 0
    """Builds that came to nothing: no room, an error, or the requests were over before."""


class IndexCache(Generic[IndexType]):
    """Problem id -> index.

    Args:
        config: `max_mib` bounds all indices together, those being built included.
        make_index: an empty index.
        executor: runs the builds; its threads read from the store. Default: one thread.
        clock: seconds; for the statistics alone.
    """

    def __init__(
        self,
        config: HistoryConfig,
        store: HistoryStore,
        make_index: Callable[[], IndexType],
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._make_index = make_index
        self._executor = executor or Background("specrollout-history")
        self._clock = clock
        self._lock = threading.RLock()
        # least recently used first
        self._entries: OrderedDict[str, ProblemIndex[IndexType]] = OrderedDict()
        # where a request's answer is indexed
        self._problem_of: dict[str, str] = {}
        self.version = 0
        """Rises whenever an index is published or dropped: until then, what `get` answered holds."""
        self._stats = IndexCacheStats()
        self._most = config.max_mib * _PER_MIB
        self._epoch = store.epoch
        self._bytes_per_token = _LEAST_GUESS

    def want(self, problem_id: str) -> None:
        """A request for the problem runs from now on; call `done` when it does no longer."""
        key = problem_id
        with self._lock:
            self._follow_epoch()
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = ProblemIndex()
                self._stats.num_bytes += _EACH
                self._executor.submit(self._build, key, entry)
            entry.running += 1
            self._entries.move_to_end(key)

    def get(self, problem_id: str) -> IndexType | None:
        """The problem's index; None: it is being built, or was dropped. Another one than before: that was dropped."""
        key = problem_id
        with self._lock:
            self._follow_epoch()
            entry = self._entries.get(key)
            if entry is None or entry.index is None:
                return None
            self._entries.move_to_end(key)
            # it grows with the answers that run
            self._resize(entry, entry.index.nbytes)
            if not self._make_room(0, key, spare_running=False):
                # alone too large
                self._forget(key)
                self._stats.dropped += 1
                return None
            return entry.index

    def done(self, problem_id: str) -> None:
        """A request for the problem runs no longer. Its index stays as long as there is room."""
        with self._lock:
            entry = self._entries.get(problem_id)
            if entry is not None and entry.running:
                entry.running -= 1

    def track(self, problem_id: str, request_id: str, document: int, epoch: int, reward: float | None = None) -> None:
        """An answer that grew in its problem's index is complete and stays: its reward and age are to count from now
        on. Until then the document is the caller's, and the cache leaves it alone."""
        with self._lock:
            key = problem_id
            entry = self._entries.get(key)
            if entry is not None and entry.index is not None:
                entry.documents[request_id] = Document(document, epoch, reward)
                self._resize(entry, entry.index.nbytes)
                entry.index.set_weight(document, self._weight(epoch, reward))
                self._problem_of[request_id] = key

    def set_reward(self, request_id: str, reward: float) -> None:
        """Weigh an answer anew, if it is in an index now; the store is told apart from this."""
        with self._lock:
            self._follow_epoch()
            entry = self._entries.get(self._problem_of.get(request_id, "\0"))
            if entry is None or entry.index is None or request_id not in entry.documents:
                return
            document = entry.documents[request_id]
            document.reward = reward
            entry.index.set_weight(document.number, self._weight(document.epoch, reward))

    def stats(self) -> IndexCacheStats:
        with self._lock:
            building = sum(entry.index is None for entry in self._entries.values())
            return replace(self._stats, indices=len(self._entries) - building, building=building)

    def close(self) -> None:
        """Give up what is being built; one build may go on reading from a disk that stands still."""
        with self._lock:
            self._entries.clear()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _weight(self, epoch: int, reward: float | None) -> int:
        # behind a jump what drafts is no older than the oldest otherwise is
        return weight_of(self._config, min(self._epoch - epoch, self._config.epochs), reward)

    def _follow_epoch(self) -> None:
        """On a new epoch, weigh anew what is in use; what is not will be built anew when its problem comes back."""
        if self._epoch == self._store.epoch:
            return
        self._epoch = self._store.epoch
        for key, entry in list(self._entries.items()):
            if entry.index is None:
                continue
            if not entry.running:
                self._forget(key)
                continue
            self._weigh(entry.index, entry.documents)
            self._resize(entry, entry.index.nbytes)

    def _weigh(self, index: IndexType, documents: dict[str, Document]) -> None:
        oldest = self._store.oldest
        for request_id, document in list(documents.items()):
            if document.epoch < oldest:
                index.remove(document.number)
                del documents[request_id]
                self._problem_of.pop(request_id, None)
            else:
                index.set_weight(document.number, self._weight(document.epoch, document.reward))

    def _forget(self, key: str) -> None:
        self.version += 1
        entry = self._entries.pop(key)
        self._stats.num_bytes -= entry.num_bytes + _EACH
        for request_id in entry.documents:
            if self._problem_of.get(request_id) == key:
                del self._problem_of[request_id]

    def _resize(self, entry: ProblemIndex[IndexType], num_bytes: int) -> None:
        self._stats.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def _make_room(self, num_bytes: int, key: str, spare_running: bool) -> bool:
        """Drop indices, the least recently used first and those in use last, until so much more fits; never `key`'s."""
        limit = self._config.max_mib << 20
        for is_running in (False,) if spare_running else (False, True):
            while self._stats.num_bytes + num_bytes > limit or (not is_running and len(self._entries) > self._most):
                victims = (
                    k for k, s in self._entries.items() if k != key and s.index and bool(s.running) == is_running
                )
                victim = next(victims, None)
                if victim is None:
                    break
                self._forget(victim)
                self._stats.dropped += 1
        return self._stats.num_bytes + num_bytes <= limit

    # --- building, in the executor's threads ---

    def _build(self, key: str, entry: ProblemIndex[IndexType]) -> None:
        start = self._clock()
        try:
            is_built = self._fill_as_far_as_it_fits(key, entry)
        except Exception:
            # without it the problem's requests decode without its drafts, and that is all
            logger.exception("an index of the history could not be built")
            is_built = False
        with self._lock:
            self._stats.build_seconds += self._clock() - start
            self._stats.built += is_built
            self._stats.given_up += not is_built
            if not is_built and self._entries.get(key) is entry:
                self._forget(key)

    def _fill_as_far_as_it_fits(self, key: str, entry: ProblemIndex[IndexType]) -> bool:
        located = self._store.find(key)
        is_short = False
        while True:
            with self._lock:
                epoch = self._epoch
                if not entry.running or self._entries.get(key) is not entry:
                    return False
            built = _Built(self._make_index(), epoch)
            if self._fill(key, entry, built, located):
                break
            if not located:
                return False
            is_short = True
            # the newer half: what is nearest to the policy of now
            located = located[(len(located) + 1) // 2 :]
        if not is_short:
            # what ended meanwhile; what ends from here on is in the index of the next epoch
            known = set(located)
            self._fill(key, entry, built, [found for found in self._store.find(key) if found not in known])
        num_tokens = sum(found.num_tokens for found in located)
        with self._lock:
            if num_tokens >= _LEAST_GUESS:
                self._bytes_per_token = max(self._bytes_per_token, 1.25 * built.index.nbytes / num_tokens)
            self._stats.shortened += is_short
            return self._publish(key, entry, built)

    def _fill(self, key: str, entry: ProblemIndex[IndexType], built: _Built[IndexType], located: list[Located]) -> bool:
        """Add answers, each once there is room for it; False: there is none."""
        index, documents = built.index, built.documents
        for found in located:
            with self._lock:
                # tables double, so an answer may add as much as there is
                step = max(index.nbytes, int(found.num_tokens * self._bytes_per_token))
                if not self._hold(key, entry, index.nbytes + step):
                    return False
            answer = self._store.read(found, key)
            if answer is None:
                continue
            # engines elsewhere may give the same ids
            name = answer.request_id if found.nearness == 2 else f"{found.number} elsewhere"
            earlier = documents.get(name)
            if earlier is not None and earlier.epoch == answer.epoch:
                continue
            # once it is published it is weighed anew, if an epoch has begun meanwhile
            weight = self._weight(answer.epoch, answer.reward)
            index.set_prompt(answer.prompt_ids)
            documents[name] = Document(index.add(answer.token_ids, weight, answer.epoch), answer.epoch, answer.reward)
        with self._lock:
            return self._hold(key, entry, index.nbytes)

    def _hold(self, key: str, entry: ProblemIndex[IndexType], num_bytes: int) -> bool:
        """Make room for an index of so many bytes; False: there is none, or nobody wants the index any more."""
        if self._entries.get(key) is not entry:
            return False
        fits = self._make_room(num_bytes - entry.num_bytes, key, spare_running=True)
        self._resize(entry, num_bytes if fits else 0)
        return fits

    def _publish(self, key: str, entry: ProblemIndex[IndexType], built: _Built[IndexType]) -> bool:
        if not self._hold(key, entry, built.index.nbytes):
            return False
        if self._epoch != built.epoch:
            self._weigh(built.index, built.documents)
        entry.index, entry.documents = built.index, built.documents
        self.version += 1
        self._problem_of |= dict.fromkeys(built.documents, key)
        return True


def weight_of(config: HistoryConfig, age: int, reward: float | None) -> int:
    """decay^age * (1 + reward_weight * max(reward, 0)), in units of 1 / `ONE`.

    RhymeRL (5.3) follows the branch with the largest sum of rewards. Here an answer without reward counts as well,
    since rewards may be zero throughout or come late, and older answers count less, since the policy has moved on (DAS
    finds answers alike mostly between epochs that are near). A large `reward_weight` is RhymeRL's rule, where answers
    without any reward still weigh enough to decide among themselves.

    Args:
        age: epochs since the answer's own; below 0 (an epoch begun anew) counts as 0.
        reward: as reported; None: not reported, counts as 0.

    Returns:
        From 1 to `MOST`: whatever is kept counts a little, unless decay is 0 and the answer old: then 0.
    """
    fresh = config.decay ** max(age, 0)
    if fresh == 0.0:
        return 0
    weight = fresh * (1.0 + config.reward_weight * max(reward or 0.0, 0.0))
    return int(min(max(round(weight * ONE), 1), MOST)) if weight < MOST else MOST
