"""All answers worth drafting from, of this engine and of those that share its directory. Indices: see index_cache.py.

At rest an answer is compressed tokens, in a file or (without `history.dir`, and until it is written) in memory, and
what says where that is: keeping.py. Any thread may call a store. Whatever waits for a disk is given to `background`,
and no lock that a caller needs is held meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
from collections.abc import Callable

from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.history.answers import Answer
from vllm_specrollout.history.epochs import MAX_EPOCH, EpochGuess, check_epoch
from vllm_specrollout.history.keeping import Keeping
from vllm_specrollout.history.memory import decode_answer
from vllm_specrollout.history.source import Located
from vllm_specrollout.history.stats import Outcome, StoreStats, check_reward
from vllm_specrollout.history.table import key_of
from vllm_specrollout.history.turns import parts
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Filter, Vocabulary
from vllm_specrollout.patience import PATIENCE_S, wait_for

logger = logging.getLogger("vllm.specrollout")


class HistoryStore:
    """Keeps answers, finds a problem's, knows the epoch.

    Args:
        config: `dir` is where; empty: in memory only.
        background: runs tasks one at a time, in the order given; in an engine, in a thread. Default: at once.
        vocabulary: the model's; answers in another one are never handed out.

    Raises:
        HistoryError: the directory cannot be used, or holds what `history.foreign` refuses.
    """

    def __init__(
        self,
        config: HistoryConfig,
        background: Callable[[Callable[[], None]], object] = operator.call,
        vocabulary: Vocabulary = ANY_VOCABULARY,
    ) -> None:
        self._config = config
        self._filter = Filter(vocabulary, config.dir)
        self._background = background
        self._lock = threading.RLock()
        # held while the disk is waited for, so that one thread at a time does; taken before the other one
        self._disk = threading.Lock()
        self._is_closed = self._is_writing_due = False
        self._kept = Keeping(config, self._lock, vocabulary, self._gone)
        self._guess = EpochGuess()
        self._is_guessing = True
        # tickets of this engine's answers that may still get a reward, by request
        self._requests: dict[str, int] = {}
        # rewards of requests that have not ended
        self._early: dict[str, float] = {}
        self._rewards = dict.fromkeys((outcome.value for outcome in Outcome), 0)
        self._is_settling_due = False
        self._epoch = self._kept.latest_epoch
        self._kept.drop_old(self._epoch)
        if self._kept.is_full:
            self._is_settling_due = True
            background(self._settle)

    @property
    def epoch(self) -> int:
        return self._epoch

    def arrived(
        self, problem_id: str, request_id: str, weights_version: int | None = None, continues: bool = False
    ) -> int:
        """A request was admitted; returns its epoch, which it may have begun (see epochs.py)."""
        with self._lock:
            begins = self._guess.arrived(problem_id, request_id, weights_version, continues) and self._is_guessing
            if begins:
                self._begin(min(max(self._epoch + 1, self._kept.latest_epoch), MAX_EPOCH))
            epoch = self._epoch
        if begins:
            self._background(self._settle)
        return epoch

    def ended(self, request_id: str) -> None:
        """A request that was admitted is over; for those without an answer, or with one under another name."""
        with self._lock:
            self._guess.ended(request_id)
            self._early.pop(request_id, None)

    def append(self, answer: Answer) -> Answer:
        """Keep the answer of a request that is over; returns it with the reward that came before its end, if one did.

        It may draft from now on, and is written in the background. A full disk is counted, and the answer stays in
        memory; where there is no room for more, the oldest goes.
        """
        with self._lock:
            self._guess.ended(answer.request_id)
            if answer.request_id in self._early:
                answer = dataclasses.replace(answer, reward=self._early.pop(answer.request_id))
            ticket = self._kept.add(answer)
            if ticket is not None:
                self._requests[answer.request_id] = ticket
        self._write_soon()
        self._settle_if_full()
        return answer

    def report_reward(self, request_id: str, reward: float) -> Outcome:
        """Keep a reward, for the most recent answer of that id.

        Raises:
            ConfigError: the reward is not a finite number.
        """
        check_reward(request_id, reward)
        with self._lock:
            outcome = self._reward(request_id, float(reward))
            self._rewards[outcome.value] += 1
        self._write_soon()
        return outcome

    def _reward(self, request_id: str, reward: float) -> Outcome:
        if self._guess.is_running(request_id):
            outcome = Outcome.REPEATED if request_id in self._early else Outcome.EARLY
            self._early[request_id] = reward
            return outcome
        ticket = self._requests.get(request_id)
        row = None if ticket is None else self._kept.table.row(ticket)
        if row is None:
            return Outcome.UNKNOWN
        place = self._kept.table.place(row)
        self._kept.set_reward(request_id, row, reward)
        if place.reward is not None:
            return Outcome.REPEATED
        return Outcome.LATE if place.epoch < self._epoch else Outcome.RECORDED

    def begin_epoch(self, epoch: int | None = None) -> int:
        """The trainer begins an epoch, the next one or the one named; from now on none is guessed. Returns it.

        To name the present one begins nothing. Raises: as `check_epoch`.
        """
        with self._lock:
            begun = check_epoch(self._epoch, epoch)
            self._is_guessing = False
            if begun != self._epoch:
                self._guess.begin()
                self._begin(begun)
        self._background(self._settle)
        return begun

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._kept.begin(epoch)

    def _write_soon(self) -> None:
        with self._lock:
            is_due = self._kept.is_behind and not self._is_writing_due and not self._is_closed
            self._is_writing_due |= is_due
        if is_due:
            self._background(self._write)

    def _write(self) -> None:
        """As `_settle`, it says itself what went wrong."""
        with self._disk:
            self._is_writing_due = False
            try:
                if not self._is_closed:
                    self._kept.write()
            except Exception as error:
                self._kept.note_error(error)
        self._settle_if_full()

    def _settle_if_full(self) -> None:
        with self._lock:
            is_due = self._kept.is_full and not self._is_settling_due and not self._is_closed
            self._is_settling_due |= is_due
        if is_due:
            self._background(self._settle)

    def _settle(self) -> None:
        """What a new epoch, or a limit that is reached, means for what is kept; may take as long as writing it does.

        It runs where nobody looks at an error, so it says itself what went wrong.
        """
        with self._disk:
            self._is_settling_due = False
            try:
                if not self._is_closed:
                    self._kept.settle(self._epoch)
            except Exception as error:
                self._kept.note_error(error)
            self._forget_dropped()

    def _gone(self, request_id: str, ticket: int) -> None:
        """An answer in memory made room for a later one."""
        if self._requests.get(request_id) == ticket:
            del self._requests[request_id]

    def _forget_dropped(self) -> None:
        """Names of answers that are gone, or so old that no reward for them counts."""
        table, rewardable = self._kept.table, max(self._epoch - self._config.epochs, self._epoch - 1)
        with self._lock:
            names = list(self._requests)
        for some in parts(names):
            with self._lock:
                for name in some:
                    ticket = self._requests.get(name)
                    row = None if ticket is None else table.row(ticket)
                    if ticket is not None and (row is None or table.place(row).epoch < rewardable):
                        del self._requests[name]

    def find(self, problem_id: str | None) -> list[Located]:
        """A problem's answers (None: all problems') that may draft now, older epochs first."""
        table, located = self._kept.table, list[Located]()
        with self._lock:
            found = table.of_problem(None if problem_id is None else key_of(problem_id))
            oldest = self._epoch - self._config.epochs
        # all answers may be one problem's
        for tickets in parts(found.picked(found.epochs >= oldest).oldest_first().tickets()):
            with self._lock:
                places = [table.place(row) for ticket in tickets if (row := table.row(ticket)) is not None]
                located += [Located(place, self._kept.source(place)) for place in places]
        return located

    def read(self, located: Located, problem_id: str | None = None) -> Answer | None:
        """The answer; None: damaged since it was found, another problem's with the same hash, or another model's."""
        place, source = located
        answer = decode_answer(source) if isinstance(source, bytes) else source.read(place.offset)
        if not isinstance(answer, Answer) or problem_id not in (None, answer.problem_id):
            return None
        return dataclasses.replace(answer, reward=place.reward) if self._filter.passes(answer) else None

    def stats(self) -> StoreStats:
        with self._lock:
            kept, folder = self._kept, self._kept.folder
            readers = folder.readers() if folder else []
            return StoreStats(
                epoch=self._epoch,
                answers=len(kept.table),
                problems=kept.table.num_problems,
                tokens=kept.table.num_tokens(),
                files=len(readers),
                # as last read: what is asked here waits for no disk, and fails with none
                file_bytes=folder.num_bytes() if folder else 0,
                memory_bytes=kept.memory.num_bytes,
                waiting=kept.num_waiting,
                damaged=sum(reader.missing for reader in readers),
                evicted=kept.evicted,
                write_errors=kept.write_errors,
                foreign_files=len(folder.foreign) if folder else 0,
                foreign_answers=self._filter.refused,
                rewards=dict(self._rewards),
            )

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is on disk, and let others have the file. What is in memory only is lost.

        A disk that stands still is not waited for longer than `patience_s` (seconds); that is said.
        """
        thread = threading.Thread(target=self._close, name="specrollout-history-close", daemon=True)
        thread.start()
        if not wait_for(thread, lambda: self._kept.num_waiting, patience_s):
            what = "the disk of the history in `%s` stands still: %d answers are not written"
            logger.warning(what, self._config.dir, self._kept.num_waiting)

    def _close(self) -> None:
        with self._disk:
            if not self._is_closed:
                self._kept.close()
            self._is_closed = True
