"""A drafter that may wait for something, on a thread of its own: it cannot hold the engine, and is simply late.

What belongs here: what such a drafter is told, in the order in which it happened, and how long its answer is waited
for. What of a late answer still holds is in late.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from vllm_specrollout.drafters.base import BaseDrafter, Drafter, Pending
from vllm_specrollout.guard import CONTAINED
from vllm_specrollout.types import DraftLimits, FinishedRequest, RequestBatch, RequestView, TreeBatch, VerifyResult

MOST_WAITING = 4096
"""Calls that may wait for a drafter that does not come back."""


class StuckError(RuntimeError):
    """A drafter has not come back for so long that too many calls wait for it."""


class OnThread(BaseDrafter):
    """Hands each call to the drafter's own thread, and waits for nothing but an answer that is likely to come in time.

    The drafter gets copies of what is valid during a call only, is called by its one thread, and need not know of it.

    Args:
        wait_ms: how long an answer to so many requests may be waited for, in milliseconds.
        clock: seconds, from any zero.
    """

    may_block = True

    def __init__(
        self, drafter: Drafter, wait_ms: Callable[[int], float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter = drafter
        self.name, self.num_sources, self.works_ahead = drafter.name, drafter.num_sources, drafter.works_ahead
        self._wait_ms, self._clock = wait_ms, clock
        self._observes = getattr(type(drafter), "observe", None) is not BaseDrafter.observe
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # that its last answer took; it is not waited for where that was too long
        self._took_ms = 0.0
        self._owed: _Answer | None = None
        self._thread = threading.Thread(target=self._run, name=f"specrollout-{drafter.name}", daemon=True)
        self._thread.start()

    # --- on the engine's thread --------------------------------------------------------------------------------------

    def propose(self, batch: RequestBatch, limits: DraftLimits) -> TreeBatch | Pending:
        views = [replace(view, token_ids=view.token_ids.copy()) for view in batch.views]
        self._raise_earlier()
        answer = self._owed = _Answer()
        self._put(lambda: self._propose(answer, replace(batch, views=views), limits))
        wait_ms = self._wait_ms(batch.size)
        if self._took_ms <= wait_ms and answer.done.wait(min(wait_ms / 1e3, threading.TIMEOUT_MAX)):
            return answer.collect()
        return answer

    def admit(self, view: RequestView) -> None:
        own = replace(view, token_ids=view.token_ids.copy())
        self._tell(lambda: self.drafter.admit(own))

    def observe(self, trees: TreeBatch, result: VerifyResult) -> None:
        # one that is late hears of nothing but what it would otherwise keep for ever
        if self._observes and (self._owed is None or self._owed.is_ready()):
            self._tell(lambda: self.drafter.observe(trees, result))

    def rollback(self, request_id: str, num_tokens: int) -> None:
        self._tell(lambda: self.drafter.rollback(request_id, num_tokens))

    def finish(self, ending: FinishedRequest) -> None:
        self._tell(lambda: self.drafter.finish(ending))

    def forget(self, request_id: str) -> None:
        self._tell(lambda: self.drafter.forget(request_id))

    def close(self) -> None:
        """The drafter is closed when it comes back, if it does; nobody waits for that."""
        self._calls.put(self.drafter.close)
        self.stop()

    def stop(self) -> None:
        """The thread ends after what it was told so far; the drafter is left as it is then."""
        self._calls.put(None)

    def _tell(self, what: Callable[[], object]) -> None:
        """It is told this whatever is raised: of what it is not told, something would be left in it.

        Raises: what an earlier call raised, once; or the drafter does not come back.
        """
        self._put(what)
        self._raise_earlier()

    def _put(self, what: Callable[[], object]) -> None:
        self._calls.put(what)
        if self._calls.qsize() > MOST_WAITING:
            raise StuckError(f"{MOST_WAITING} calls wait for drafter {self.name}, which does not come back")

    def _raise_earlier(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    # --- on the drafter's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (what := self._calls.get()) is not None:
            try:
                what()
            except CONTAINED as error:
                self._error = error

    def _propose(self, answer: _Answer, batch: RequestBatch, limits: DraftLimits) -> None:
        begin = self._clock()
        try:
            trees = self.drafter.propose(batch, limits)
            if not isinstance(trees, TreeBatch):
                raise TypeError(f"{type(trees).__name__} in the place of a TreeBatch, of a drafter that may block")
            answer.trees = trees
        except CONTAINED as error:
            answer.error = error
        finally:
            self._took_ms = (self._clock() - begin) * 1e3
            answer.done.set()


class _Answer:
    """An answer on its way from the drafter's thread."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.trees: TreeBatch | None = None
        self.error: BaseException | None = None

    def is_ready(self) -> bool:
        return self.done.is_set()

    def collect(self) -> TreeBatch:
        """Raises: what the drafter raised."""
        if self.error is not None:
            raise self.error
        assert self.trees is not None, "collected before it was ready"
        return self.trees
