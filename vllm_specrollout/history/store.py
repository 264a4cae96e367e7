"""All answers worth drafting from, of this engine and of those that share its directory. Indices: see index_cache.py.

At rest an answer is a row of a database: of this engine's file, or, without `history.dir`, in memory. What comes waits
in memory, drafts from there, and is written by `background`: no call but `find`, `read` and `close` waits for a disk,
and no lock that a caller needs is held meanwhile. Any thread may call a store.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_specrollout.config.checks import check_finite
from vllm_specrollout.config.drafters import HistoryConfig
from vllm_specrollout.errors import logger, shown
from vllm_specrollout.history.answers import RewardOutcome, StoreStats, short_name
from vllm_specrollout.history.database import (
    ERRORS,
    AnswerCounts,
    Database,
    Located,
    Reward,
    Row,
    answer_of,
    as_bytes,
    row_of,
)
from vllm_specrollout.history.epochs import MAX_EPOCH, EpochGuess, check_epoch, lowest_of, oldest_of
from vllm_specrollout.history.folder import Folder
from vllm_specrollout.history.vocabulary import ANY_VOCABULARY, Filter, Vocabulary
from vllm_specrollout.observe.patience import PATIENCE_S, wait_for
from vllm_specrollout.types import Answer

PER_MIB = 768
"""Answers for each MiB of `history.max_mib`: Python takes some 600 bytes for one that may still get a reward."""
_MOST_AT_ONCE = 256
# of an answer that waits, beside its row's bytes; and of one that may still get a reward
_EACH, _NAMED = 256, 600


@dataclass(slots=True, eq=False)
class _Kept:
    """An answer of this engine, as long as it waits or may get a reward."""

    request_id: str
    epoch: int
    reward: float | None
    # None: it is written
    row: Row | None
    # in the own file; 0: it is not there yet
    number: int = 0

    @property
    def num_bytes(self) -> int:
        row = self.row
        return 0 if row is None else _EACH + len(row.problem) + len(row.request) + len(row.tail) + len(row.tokens)


class HistoryStore:
    """Keeps answers, finds a problem's, knows the epoch.

    Args:
        config: `dir` is where; empty: in memory only.
        background: runs tasks one at a time, in the order given; in an engine, in a thread. Default: at once.
        vocabulary: the model's; answers in another one are never handed out.

    Raises:
        HistoryError: the directory cannot be used.
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
        self._is_closed = self._is_work_due = self._must_settle = False
        self._guess = EpochGuess()
        self._is_guessing = True
        # this engine's answers that may still get a reward, by request; oldest first
        self._requests: dict[str, _Kept] = {}
        # those that are not written yet, oldest first; and, by number, those whose rewards are not
        self._waiting: dict[_Kept, None] = {}
        self._due: dict[int, _Kept] = {}
        self._waiting_bytes = 0
        # rewards of requests that have not ended
        self._early: dict[str, float] = {}
        self._rewards = dict.fromkeys((outcome.value for outcome in RewardOutcome), 0)
        self._most = config.max_mib * PER_MIB
        self._most_waiting_bytes = config.max_mib << 20
        # of the own file: what is free in it and SQLite's log are to have room beside it
        self._most_bytes = config.max_disk_mib << 19 if config.dir else self._most_waiting_bytes
        where = Path(config.dir) if config.dir else None
        self._folder = Folder(where, vocabulary, config.run)
        self._epoch = self._epoch_written = self._folder.latest_epoch
        # epochs that hold answers of this run here: the newest, as last looked at, and those that came since
        self._held = frozenset[int]()
        self._evicted = self._write_errors = self._unread = 0
        # what there is in the own file and in others', as last counted, and answers of the own that came since
        self._own = self._others = AnswerCounts(0, 0, 0)
        self._file_bytes = self._used_bytes = self._uncounted = 0
        # where making room has failed: the size at which it is tried again
        self._next_bytes = 0
        self._try(self._count_all)
        if self._is_full:
            self._work_soon(settle=True)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def oldest(self) -> int:
        """The oldest epoch whose answers draft."""
        return oldest_of(self._epoch, self._config.epochs, self._held)

    def arrived(
        self, problem_id: str, request_id: str, weights_version: int | None = None, continues: bool = False
    ) -> int:
        """A request was admitted; returns its epoch, which it may have begun (see epochs.py)."""
        request_id = short_name(request_id)
        with self._lock:
            begins = self._guess.arrived(problem_id, request_id, weights_version, continues) and self._is_guessing
            if begins:
                self._epoch = min(max(self._epoch + 1, self._folder.latest_epoch), MAX_EPOCH)
            epoch = self._epoch
        if begins:
            self._work_soon(settle=True)
        return epoch

    def ended(self, request_id: str) -> None:
        """A request that was admitted is over; for those without an answer, or with one under another name."""
        request_id = short_name(request_id)
        with self._lock:
            self._guess.ended(request_id)
            self._early.pop(request_id, None)

    def append(self, answer: Answer) -> Answer:
        """Keep the answer of a request that is over; returns it under the name that it is kept by (`short_name`), with
        the reward that came before its end, if one did.

        It may draft from now on, and is written in the background. A full disk is counted, and the answer stays in
        memory; where there is no room for more, the oldest goes.
        """
        request_id = short_name(answer.request_id)
        with self._lock:
            self._guess.ended(request_id)
            reward = self._early.pop(request_id, answer.reward)
            # one that began in an epoch which was taken back is of the present one
            epoch = min(answer.epoch, self._epoch)
            self._held |= {epoch}
        answer = dataclasses.replace(answer, request_id=request_id, epoch=epoch, reward=reward)
        try:
            kept = _Kept(answer.request_id, answer.epoch, reward, row_of(answer))
        except ValueError as error:
            # longer than an answer may be
            self._note_error(error)
            return answer
        with self._lock:
            # behind those that came before
            self._requests.pop(answer.request_id, None)
            self._requests[answer.request_id] = kept
            self._waiting[kept] = None
            self._waiting_bytes += kept.num_bytes
            self._make_room()
        self._work_soon()
        return answer

    def _make_room(self) -> None:
        """Drop the oldest of what waits, where it takes too much. The newest is to reach the disk, however large."""
        while len(self._waiting) > 1 and (
            self._waiting_bytes > self._most_waiting_bytes or len(self._waiting) > self._most
        ):
            oldest = next(iter(self._waiting))
            self._no_longer_waits(oldest)
            self._forget(oldest)
            self._evicted += 1
        while len(self._requests) > self._most:
            self._forget(next(iter(self._requests.values())))

    def _no_longer_waits(self, kept: _Kept) -> None:
        del self._waiting[kept]
        self._waiting_bytes -= kept.num_bytes
        kept.row = None

    def _forget(self, kept: _Kept) -> None:
        """No reward for it counts any more."""
        self._due.pop(kept.number, None)
        if self._requests.get(kept.request_id) is kept:
            del self._requests[kept.request_id]

    def report_reward(self, request_id: str, reward: float) -> RewardOutcome:
        """Keep a reward, for the most recent answer of that id.

        Raises:
            ConfigError: the reward is not a finite number.
        """
        number = check_finite(f"reward of request {shown(request_id)}", reward)
        with self._lock:
            outcome = self._reward(short_name(request_id), number)
            self._rewards[outcome.value] += 1
        self._work_soon()
        return outcome

    def _reward(self, request_id: str, reward: float) -> RewardOutcome:
        if self._guess.is_running(request_id):
            outcome = RewardOutcome.REPEATED if request_id in self._early else RewardOutcome.EARLY
            self._early[request_id] = reward
            return outcome
        kept = self._requests.get(request_id)
        if kept is None:
            return RewardOutcome.UNKNOWN
        before, kept.reward = kept.reward, reward
        if kept.row is None and before != reward:
            self._due[kept.number] = kept
        if before is not None:
            return RewardOutcome.REPEATED
        return RewardOutcome.LATE if kept.epoch < self._epoch else RewardOutcome.RECORDED

    def begin_epoch(self, epoch: int | None = None) -> int:
        """The trainer begins an epoch, the next one or the one named; from now on none is guessed. Returns it.

        To name the present one begins nothing. Raises: as `check_epoch`.
        """
        with self._lock:
            begun = check_epoch(self._epoch, epoch, lowest_of(self._epoch, self._held))
            self._is_guessing = False
            if begun != self._epoch:
                self._guess.begin()
                self._epoch = begun
        self._work_soon(settle=True)
        return begun

    # --- reading -----------------------------------------------------------------------------------------------------

    def find(self, problem_id: str | None) -> list[Located]:
        """A problem's answers (None: all problems') that may draft now: other nodes' first, then older epochs."""
        if self._folder.has_changed:
            self._work_soon(settle=True)
        problem = None if problem_id is None else as_bytes(problem_id)
        oldest = self.oldest
        with self._lock:
            # before the files: what is written meanwhile is found twice rather than never
            waiting = [(kept, kept.row._replace(reward=kept.reward)) for kept in self._waiting if kept.row is not None]
        found, own = list[Located](), set[int]()
        for source in self._folder.sources:
            try:
                found += source.places(problem, oldest, self._most)
            except ERRORS as error:
                # it is named when files are looked for the next time
                source.failure = error
                self._unread += 1
        for place in found:
            if isinstance(place.source, Database) and place.source.path == self._folder.own.path:
                own.add(place.number)
        for kept, row in waiting:
            if kept.number not in own and problem in (None, row.problem) and oldest <= row.epoch:
                found.append(Located(row, 0, row.epoch, row.num_tokens))
        # another run's are for problems that this one has not answered yet
        found = [one for one in found if one.nearness] or found
        return sorted(found, key=lambda one: (one.nearness, one.epoch))[-self._most :]

    def read(self, located: Located, problem_id: str | None = None) -> Answer | None:
        """The answer; None: dropped since it was found, damaged, another problem's, or another model's."""
        source, late = located.source, None
        try:
            if isinstance(source, Row):
                row: Row | None = source
            else:
                # before the file: a reward that is not due is there
                late = self._due.get(located.number) if source.path == self._folder.own.path else None
                row = source.row(located.number)
            answer = None if row is None else answer_of(row if late is None else row._replace(reward=late.reward))
        except (ValueError, *ERRORS):
            self._unread += 1
            return None
        if answer is None or problem_id not in (None, answer.problem_id):
            return None
        return answer if self._filter.passes(answer) else None

    def stats(self) -> StoreStats:
        with self._lock:
            is_on_disk, waiting = bool(self._config.dir), [kept.row for kept in self._waiting if kept.row is not None]
            held = self._waiting_bytes + (0 if is_on_disk else self._used_bytes) + _NAMED * len(self._requests)
            return StoreStats(
                epoch=self._epoch,
                lowest=lowest_of(self._epoch, self._held),
                answers=self._own.answers + self._others.answers + len(waiting),
                problems=self._own.problems + self._others.problems,
                tokens=self._own.tokens + self._others.tokens + sum(row.num_tokens for row in waiting),
                files=len(self._folder.sources) if is_on_disk else 0,
                # as last counted: what is asked here waits for no disk, and fails with none
                file_bytes=self._file_bytes if is_on_disk else 0,
                memory_bytes=held,
                waiting=len(waiting) if is_on_disk else 0,
                damaged=self._unread,
                evicted=self._evicted,
                write_errors=self._write_errors,
                foreign_files=len(self._folder.foreign),
                foreign_answers=self._filter.refused,
                rewards=dict(self._rewards),
            )

    # --- writing, in the background ----------------------------------------------------------------------------------

    def _work_soon(self, settle: bool = False) -> None:
        with self._lock:
            self._must_settle |= settle
            has_work = bool(self._must_settle or self._waiting or self._due)
            is_due = has_work and not self._is_work_due and not self._is_closed
            self._is_work_due |= is_due
        if is_due:
            self._background(self._work)

    def _work(self) -> None:
        """It runs where nobody looks at an error, so it says itself what went wrong."""
        with self._disk:
            self._is_work_due = False
            if not self._is_closed:
                self._try(self._write_all)
                if self._must_settle or self._is_full:
                    self._must_settle = False
                    self._settle()

    def _try(self, step: Callable[[], object]) -> None:
        """Whatever fails, the steps after it are done all the same."""
        try:
            step()
        except Exception as error:
            self._note_error(error)
            if type(error) is sqlite3.DatabaseError:
                # the own file is damaged
                damage = error
                self._try(lambda: self._replace_own(damage))

    def _replace_own(self, error: Exception) -> None:
        self._folder.replace_own(error)
        self._epoch_written, self._due = 0, {}
        self._count_all()

    def _note_error(self, error: Exception) -> None:
        if not self._write_errors:
            logger.warning(
                "the history in `%s` cannot be written, answers stay in memory: %s: %s",
                self._config.dir,
                type(error).__name__,
                error,
            )
        self._write_errors += 1

    def _write_all(self) -> None:
        """Write what has come since: answers, the oldest first, rewards, the epoch. Nobody waits meanwhile."""
        while True:
            with self._lock:
                few, num_bytes = list[tuple[_Kept, Row]](), 0
                for kept in itertools.islice(self._waiting, _MOST_AT_ONCE):
                    if num_bytes < self._most_bytes // 16 and kept.row is not None:
                        own = kept.row._replace(reward=kept.reward, epoch=min(kept.epoch, self._epoch))
                        few.append((kept, own))
                        num_bytes += kept.num_bytes
                due = [(kept, kept.reward) for kept in itertools.islice(self._due.values(), _MOST_AT_ONCE)]
                epoch = self._epoch if self._epoch != self._epoch_written else None
            if not few and not due and epoch is None:
                return
            rewards = [
                Reward(reward, kept.number, as_bytes(kept.request_id)) for kept, reward in due if reward is not None
            ]
            numbers = self._folder.own.write([row for _, row in few], rewards, epoch)
            with self._lock:
                self._epoch_written = self._epoch_written if epoch is None else epoch
                for kept, reward in due:
                    if kept.reward == reward:
                        self._due.pop(kept.number, None)
                for (kept, row), number in zip(few, numbers, strict=True):
                    kept.number = number
                    if kept in self._waiting:
                        self._no_longer_waits(kept)
                        if kept.reward != row.reward:
                            self._due[kept.number] = kept
                added = sum(row.num_tokens for _, row in few)
                self._own = AnswerCounts(self._own.answers + len(few), self._own.tokens + added, self._own.problems)
                self._uncounted += len(few)
            self._measure()

    def _measure(self) -> None:
        """Problems are counted when an eighth more answers have come: it takes long where there are many."""
        if 8 * self._uncounted >= self._own.answers:
            self._own, self._uncounted = self._folder.own.counts(self.oldest), 0
        self._used_bytes, self._file_bytes = self._folder.own.used_bytes(), self._folder.num_bytes()

    def _count_all(self) -> None:
        held = self._folder.epochs(self._config.epochs + 2)
        with self._lock:
            self._held = frozenset(held) | {kept.epoch for kept in self._waiting}
        self._folder.own.bound_log(min(1 << 20, self._most_bytes // 16))
        self._others = self._folder.counts_of_others(self.oldest)
        self._uncounted = self._own.answers
        self._measure()

    # --- settling, in the background ---------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        used = self._used_bytes + (0 if self._config.dir else self._waiting_bytes)
        return self._own.answers > self._most or used > max(self._most_bytes, self._next_bytes)

    def _settle(self) -> None:
        """What a new epoch, or a limit that is reached, means for what is kept; may take as long as writing it does."""
        for step in (
            lambda: self._folder.own.sync(),
            self._folder.refresh,
            lambda: self._folder.own.drop_before(self.oldest),
            self._count_all,
            self._evict,
            lambda: self._folder.own.give_back(),
            lambda: self._folder.remove_stale(self.oldest, 2 * self._most_bytes - self._used_bytes),
            self._count_all,
            self._forget_old,
        ):
            self._try(step)
        # where making room has failed it is tried again once there is a sixteenth more
        self._next_bytes = self._used_bytes + self._most_bytes // 16

    def _evict(self) -> None:
        """Drop what there is no room for, and a sixteenth more, so that this is not done for every answer."""
        own, dropped = self._folder.own, set[int]()
        most_bytes = self._most_bytes - (0 if self._config.dir else self._waiting_bytes)
        if (surplus := self._own.answers - self._most) > 0:
            dropped |= own.drop_oldest(surplus + self._most // 16)
        if own.used_bytes() > most_bytes:
            while own.used_bytes() > most_bytes * 15 // 16 and (few := own.drop_oldest(1 + self._own.answers // 16)):
                dropped |= few
        with self._lock:
            self._evicted += len(dropped)
            gone = [kept for kept in self._requests.values() if kept.number in dropped]
        self._forget_all(gone)

    def _forget_old(self) -> None:
        """Names of answers that are so old that no reward for them counts."""
        rewardable = oldest_of(self._epoch, min(1, self._config.epochs), self._held)
        with self._lock:
            gone = [kept for kept in self._requests.values() if kept.epoch < rewardable]
        self._forget_all(gone)

    def _forget_all(self, gone: list[_Kept]) -> None:
        for kept in gone:
            # one by one: others want the lock too
            with self._lock:
                self._forget(kept)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is on disk, and let others have the file. What is in memory only is lost.

        A disk that stands still is not waited for longer than `patience_s` (seconds); that is said.
        """
        thread = threading.Thread(target=self._close, name="specrollout-history-close", daemon=True)
        thread.start()
        if not wait_for(thread, lambda: len(self._waiting), patience_s):
            what = "the disk of the history in `%s` stands still: %d answers are not written"
            logger.warning(what, self._config.dir, len(self._waiting))

    def _close(self) -> None:
        with self._disk:
            if not self._is_closed:
                for step in (self._write_all, lambda: self._folder.own.sync(), self._folder.close):
                    self._try(step)
            self._is_closed = True
